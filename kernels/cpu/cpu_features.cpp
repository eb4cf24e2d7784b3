// The contract is in cpu_features.h. Bit numbers are from Intel's Software Developer's Manual, volume 2
// (CPUID) and volume 1, chapter 13 (XCR0).
#include "cpu_features.h"

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__) || defined(_M_IX86)
#define MREM_X86 1
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace mrem {
namespace {

#ifdef MREM_X86
struct Registers {
    std::uint32_t eax, ebx, ecx, edx;
};

// Zeros for a leaf that the processor does not have.
Registers cpuid(std::uint32_t leaf, std::uint32_t part = 0) {
    Registers r{};
#if defined(_MSC_VER)
    int values[4];
    __cpuid(values, 0);
    if (static_cast<std::uint32_t>(values[0]) < leaf) return r;
    __cpuidex(values, static_cast<int>(leaf), static_cast<int>(part));
    r = {static_cast<std::uint32_t>(values[0]), static_cast<std::uint32_t>(values[1]),
         static_cast<std::uint32_t>(values[2]), static_cast<std::uint32_t>(values[3])};
#else
    if (!__get_cpuid_count(leaf, part, &r.eax, &r.ebx, &r.ecx, &r.edx)) return Registers{};
#endif
    return r;
}

// Which registers the operating system saves. Requires: CPUID says that XGETBV is enabled.
std::uint64_t xcr0() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    std::uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<std::uint64_t>(high) << 32 | low;
#endif
}

constexpr bool bit(std::uint32_t word, int position) { return (word >> position & 1u) != 0; }

CpuFeatures detect() {
    constexpr std::uint64_t kSse = 1u << 1, kAvx = 1u << 2, kMasksAndZmm = 7u << 5, kTiles = 3u << 17;
    const Registers basic = cpuid(1), extended = cpuid(7),
                    more = extended.eax > 0 ? cpuid(7, 1) : Registers{};
    const bool osxsave = bit(basic.ecx, 27);
    const std::uint64_t saved = osxsave ? xcr0() : 0;
    CpuFeatures found{};
    found.cpuid_avx2 = bit(basic.ecx, 28) && bit(extended.ebx, 5);
    found.cpuid_avx512f = bit(extended.ebx, 16);
    found.os_avx = (saved & (kSse | kAvx)) == (kSse | kAvx);
    found.os_avx512 = found.os_avx && (saved & kMasksAndZmm) == kMasksAndZmm;
    found.cpuid_fma = bit(basic.ecx, 12);
    found.cpuid_avx_vnni = bit(more.eax, 4);
    found.cpuid_avx512_vnni = found.cpuid_avx512f && bit(extended.ebx, 17) && bit(extended.ebx, 30) &&
                              bit(extended.ebx, 31) && bit(extended.ecx, 11);
    found.cpuid_amx_int8 = bit(extended.edx, 24) && bit(extended.edx, 25);
    found.os_amx = (saved & kTiles) == kTiles;
    return found;
}
#else
CpuFeatures detect() { return CpuFeatures{}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures found = detect();
    return found;
}

}  // namespace mrem
