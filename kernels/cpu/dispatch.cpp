// The contract is in dispatch.h.
#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace mrem {
namespace {

constexpr const char* kVariable = "MREM_CPU_TARGET";
std::atomic<const Kernels*> active{nullptr};

std::string names() {
    std::string listed;
    for (const Target& target : targets()) {
        listed += (listed.empty() ? "" : ", ") + std::string(target.kernels->name);
    }
    return listed;
}

const Kernels& choose() {
    const char* wanted = std::getenv(kVariable);
    if (wanted != nullptr && *wanted != '\0') {
        try {
            return named_target(wanted);
        } catch (const std::invalid_argument& problem) {
            throw std::invalid_argument(std::string(kVariable) + ": " + problem.what());
        }
    }
    for (const Target& target : targets()) {
        if (target.supported(cpu_features())) return *target.kernels;
    }
    return kScalarKernels;
}

}  // namespace

const std::vector<Target>& targets() {
    static const std::vector<Target> list = {
#ifdef MREM_HAVE_AVX512
        {&kAvx512Kernels, [](const CpuFeatures& cpu) { return cpu.avx512f(); }, "AVX-512 Foundation"},
#endif
#ifdef MREM_HAVE_AVX2
        {&kAvx2Kernels, [](const CpuFeatures& cpu) { return cpu.avx2(); }, "AVX2"},
#endif
        {&kScalarKernels, [](const CpuFeatures&) { return true; }, "nothing special"},
    };
    return list;
}

const Kernels& find_target(const std::string& name) {
    for (const Target& target : targets()) {
        if (name != target.kernels->name) continue;
        if (target.supported(cpu_features())) return *target.kernels;
        throw std::invalid_argument("the CPU target \"" + name + "\" needs " + target.needs +
                                    ", which this processor or its operating system does not support");
    }
    throw std::invalid_argument("there is no CPU target \"" + name + "\"; this build has " + names());
}

const Kernels& named_target(const std::string& name) {
    if (name == "avxvnni") return find_target("avx2");
    if (name == "avx512vnni" || name == "amx") return find_target("avx512");
    return find_target(name);
}

const Kernels& active_kernels() {
    const Kernels* found = active.load(std::memory_order_acquire);
    if (found == nullptr) {
        found = &choose();
        active.store(found, std::memory_order_release);
    }
    return *found;
}

void use_target(const std::string& name) { active.store(&find_target(name), std::memory_order_release); }

}  // namespace mrem
