// The contract is in targets.h.
#include "targets.h"

#include <cstdlib>
#include <stdexcept>

#include "active.h"

namespace mrem::runtime {
namespace {

constexpr const char* kVariable = "MREM_CPU_TARGET";

#ifdef MREM_RUNTIME_HAVE_FLOATS_AVX512
[[maybe_unused]] const FloatKernels& kWideFloats = kAvx512Floats;
#endif
#ifdef MREM_RUNTIME_HAVE_FLOATS_AVX2
[[maybe_unused]] const FloatKernels& kNarrowFloats = kAvx2Floats;
#endif

bool always() { return true; }

std::string names() {
    std::string listed;
    for (const Target& target : targets()) {
        listed += (listed.empty() ? "" : ", ") + std::string(target.name());
    }
    return listed;
}

}  // namespace

const std::vector<Target>& targets() {
    static const std::vector<Target> list = {
#ifdef MREM_RUNTIME_HAVE_AMX
        {&kAmxGemm, &kWideFloats, [] { return cpu_features().avx512_vnni() && amx_permitted(); },
         "AMX with 8-bit integers, AVX-512 VNNI and Linux 5.16 or newer"},
#endif
#ifdef MREM_RUNTIME_HAVE_AVX512VNNI
        {&kAvx512VnniGemm, &kWideFloats, [] { return cpu_features().avx512_vnni(); }, "AVX-512 VNNI"},
#endif
#ifdef MREM_RUNTIME_HAVE_AVXVNNI
        {&kAvxVnniGemm, &kNarrowFloats, [] { return cpu_features().avx_vnni(); }, "AVX-VNNI"},
#endif
#ifdef MREM_RUNTIME_HAVE_AVX2
        {&kAvx2Gemm, &kNarrowFloats, [] { return cpu_features().avx2_fma(); }, "AVX2 and FMA"},
#endif
        {&kScalarGemm, &kScalarFloats, always, "nothing special"},
    };
    return list;
}

const Target* find_target(const std::string& name, std::string* problem) {
    for (const Target& target : targets()) {
        if (name != target.name()) continue;
        if (target.supported()) return &target;
        *problem = "the CPU target \"" + name + "\" needs " + target.needs +
                   ", which this processor or its operating system does not support";
        return nullptr;
    }
    *problem = "there is no CPU target \"" + name + "\"; this build has " + names();
    return nullptr;
}

const Target& best_target() {
    for (const Target& target : targets()) {
        if (target.supported()) return target;
    }
    return targets().back();
}

const Target* named_target(const std::string& name, std::string* problem) {
    if (name != "avx512") return find_target(name, problem);
    if (cpu_features().avx512f()) return &best_target();
    *problem =
        "the CPU target \"avx512\" needs AVX-512 Foundation, which this processor or its operating system "
        "does not support";
    return nullptr;
}

const Target* choose_target(std::string* problem) {
    const char* wanted = std::getenv(kVariable);
    if (wanted != nullptr && *wanted != '\0') {
        const Target* found = named_target(wanted, problem);
        if (found == nullptr) *problem = std::string(kVariable) + ": " + *problem;
        return found;
    }
    return &best_target();
}

const Target& current_target() {
    static const Target& chosen = []() -> const Target& {
        std::string problem;
        const Target* found = choose_target(&problem);
        if (found == nullptr) throw std::invalid_argument(problem);
        return *found;
    }();
    return chosen;
}

const FloatKernels& active_floats() { return *current_target().floats; }
const char* active_target() { return current_target().name(); }

}  // namespace mrem::runtime
