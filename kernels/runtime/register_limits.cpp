// The contract is in register_limits.h. Every function has its own instructions, and is called only where
// they run.
#include "register_limits.h"

#include "unroll.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace mrem::runtime {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)
constexpr int kRounds = 20000, kAccumulators = 12;

#if defined(MREM_RUNTIME_HAVE_AVX512VNNI)
__attribute__((target("avx512f,avx512vnni,avx512bw"))) void vnni512() {
    constexpr int kWide = 24;
    __m512i acc[kWide], x = _mm512_set1_epi32(3), w = _mm512_set1_epi32(5);
    MREM_UNROLLED
    for (int k = 0; k < kWide; ++k) acc[k] = _mm512_setzero_si512();
    for (int i = 0; i < kRounds; ++i) {
        MREM_UNROLLED
        for (int k = 0; k < kWide; ++k) acc[k] = _mm512_dpbusd_epi32(acc[k], x, w);
        MREM_UNROLLED
        for (int k = 0; k < kWide; ++k) __asm__ volatile("" : "+v"(acc[k]));
    }
}
#endif

#if defined(MREM_RUNTIME_HAVE_AVXVNNI)
__attribute__((target("avx2,avxvnni"))) void vnni256() {
    __m256i acc[kAccumulators], x = _mm256_set1_epi32(3), w = _mm256_set1_epi32(5);
    MREM_UNROLLED
    for (int k = 0; k < kAccumulators; ++k) acc[k] = _mm256_setzero_si256();
    for (int i = 0; i < kRounds; ++i) {
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) acc[k] = _mm256_dpbusd_avx_epi32(acc[k], x, w);
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) __asm__ volatile("" : "+x"(acc[k]));
    }
}
#endif

#if defined(MREM_RUNTIME_HAVE_AVX2)
int run_length = 1;
__m256i wide_sums[kAccumulators];

__attribute__((target("avx2"))) void in_16_bits() {
    __m256i acc[kAccumulators], x = _mm256_set1_epi32(3), w = _mm256_set1_epi32(5);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int i = 0; i < kRounds; i += run_length) {
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) acc[k] = _mm256_setzero_si256();
        for (int j = 0; j < run_length; ++j) {
            MREM_UNROLLED
            for (int k = 0; k < kAccumulators; ++k) {
                __asm__ volatile("" : "+x"(x));  // another product every time
                acc[k] = _mm256_add_epi16(acc[k], _mm256_maddubs_epi16(x, w));
            }
            MREM_UNROLLED
            for (int k = 0; k < kAccumulators; ++k) __asm__ volatile("" : "+x"(acc[k]));
        }
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) {
            wide_sums[k] = _mm256_add_epi32(wide_sums[k], _mm256_madd_epi16(acc[k], ones));
        }
    }
}

__attribute__((target("avx2"))) void in_32_bits() {
    __m256i acc[kAccumulators], x = _mm256_set1_epi32(3), w = _mm256_set1_epi32(5);
    MREM_UNROLLED
    for (int k = 0; k < kAccumulators; ++k) acc[k] = _mm256_setzero_si256();
    for (int i = 0; i < kRounds; ++i) {
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) {
            __asm__ volatile("" : "+x"(x));
            acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(x, w));
        }
        MREM_UNROLLED
        for (int k = 0; k < kAccumulators; ++k) __asm__ volatile("" : "+x"(acc[k]));
    }
}
#endif
#endif

}  // namespace

RegisterLoop register_loop(const char* target, int run) {
    (void)target, (void)run;
#if defined(__x86_64__) && defined(__GNUC__)
    [[maybe_unused]] const double instructions = static_cast<double>(kRounds) * kAccumulators;
#if defined(MREM_RUNTIME_HAVE_AVX512VNNI)
    if (std::strcmp(target, "avx512vnni") == 0) return {vnni512, instructions * 2 * 64};
#endif
#if defined(MREM_RUNTIME_HAVE_AVXVNNI)
    if (std::strcmp(target, "avxvnni") == 0) return {vnni256, instructions * 32};
#endif
#if defined(MREM_RUNTIME_HAVE_AVX2)
    if (std::strcmp(target, "avx2") == 0) {
        if (run == 0) return {in_32_bits, instructions * 16};
        run_length = run;
        const int runs = (kRounds + run - 1) / run;
        return {in_16_bits, static_cast<double>(runs) * run * kAccumulators * 32};
    }
#endif
#endif
    return {nullptr, 0.0};
}

}  // namespace mrem::runtime
