// Which instruction set runs: the first in order of priority that was compiled and that this processor and
// operating system support. The environment variable MREM_CPU_TARGET chooses another.
#pragma once

#include <string>
#include <vector>

#include "cpu_features.h"
#include "float_kernels.h"
#include "gemm_kernels.h"

namespace mrem::runtime {

struct Target {
    const GemmKernels* gemm;
    const FloatKernels* floats;
    bool (*supported)();
    const char* needs;  // in words

    const char* name() const { return gemm->name; }
};

// Best first; the last, "scalar", is portable.
const std::vector<Target>& targets();

// Whether this process may use AMX; asks the operating system at the first call.
bool amx_permitted();

// The first that can run here.
const Target& best_target();

// Null, with the reason in `problem`, if there is no such target or it cannot run here.
const Target* find_target(const std::string& name, std::string* problem);

// The same for a name in MREM_CPU_TARGET, which the training extension (kernels/cpu) reads too. Its name
// "avx512" means the best target here of a processor that has AVX-512 Foundation.
const Target* named_target(const std::string& name, std::string* problem);

// The target that MREM_CPU_TARGET names, or the best. Null, with the reason, if the name is wrong.
const Target* choose_target(std::string* problem);

// The same, decided at the first call; throws std::invalid_argument with the reason.
const Target& current_target();

}  // namespace mrem::runtime
