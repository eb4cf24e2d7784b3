// Which instruction set runs: the first in order of priority that was compiled and that this processor and
// operating system support. The environment variable MREM_CPU_TARGET chooses another.
#pragma once

#include <string>
#include <vector>

#include "cpu_features.h"
#include "kernels.h"

namespace mrem {

struct Target {
    const Kernels* kernels;
    bool (*supported)(const CpuFeatures&);
    const char* needs;  // in words
};

// Best first; the last, "scalar", is portable.
const std::vector<Target>& targets();

// Throws std::invalid_argument with a message for people if there is no such target or it cannot run here.
const Kernels& find_target(const std::string& name);

// The same for a name in MREM_CPU_TARGET, which the CPU runtime (kernels/runtime) reads too: its names mean
// the kernels here for such a processor, "avxvnni" those of "avx2", "avx512vnni" and "amx" those of "avx512".
const Kernels& named_target(const std::string& name);

// The kernels in use. Decided at the first call; throws as named_target does if MREM_CPU_TARGET is wrong.
const Kernels& active_kernels();

// Switches all threads to that target; throws as find_target does.
void use_target(const std::string& name);

}  // namespace mrem
