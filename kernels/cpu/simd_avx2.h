// Sixteen floats in two AVX2 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace mrem {
namespace {

struct Avx2 {
    static constexpr std::size_t kHalf = 8;  // floats per register
    struct F {
        __m256 a, b;
    };
    struct D {
        __m256d a, b, c, d;
    };
    using M = F;  // all bits of a lane, or none

    static F all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    static F load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + kHalf)}; }
    static void store(F x, float* to) {
        _mm256_storeu_ps(to, x.a);
        _mm256_storeu_ps(to + kHalf, x.b);
    }
    static void store_past_cache(F x, float* to) {
        _mm256_stream_ps(to, x.a);
        _mm256_stream_ps(to + kHalf, x.b);
    }
    static void fence() { _mm_sfence(); }
    // The first n lanes, n at most 8, as a mask.
    static __m256i first(std::size_t n) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
    }
    static std::size_t in_a(std::size_t n) { return n < kHalf ? n : kHalf; }
    static std::size_t in_b(std::size_t n) { return n < kHalf ? 0 : n - kHalf; }
    static F load_first(const float* from, std::size_t n) {
        const __m256 rest =
            in_b(n) == 0 ? _mm256_setzero_ps() : _mm256_maskload_ps(from + kHalf, first(in_b(n)));
        return {_mm256_maskload_ps(from, first(in_a(n))), rest};
    }
    static void store_first(F x, float* to, std::size_t n) {
        _mm256_maskstore_ps(to, first(in_a(n)), x.a);
        if (in_b(n) != 0) _mm256_maskstore_ps(to + kHalf, first(in_b(n)), x.b);
    }
    static F keep_first(F x, std::size_t n) {
        return {_mm256_and_ps(x.a, _mm256_castsi256_ps(first(in_a(n)))),
                _mm256_and_ps(x.b, _mm256_castsi256_ps(first(in_b(n))))};
    }

    static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    static F abs(F x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
    }
    static F round(F x) {
        constexpr int kToEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(x.a, kToEven), _mm256_round_ps(x.b, kToEven)};
    }
    // min and max return their second operand if one is NaN. So x comes second, and NaN stays.
    static F clamp(F x, F low, F high) {
        return {_mm256_min_ps(high.a, _mm256_max_ps(low.a, x.a)),
                _mm256_min_ps(high.b, _mm256_max_ps(low.b, x.b))};
    }
    static M greater(F x, F y) {
        return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
    }
    static F where(M m, F yes, F no) {
        return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
    }

    static D zeros() {
        return {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    }
    static D widen(F x) {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
                _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))};
    }
    static D add(D x, D y) {
        return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b), _mm256_add_pd(x.c, y.c),
                _mm256_add_pd(x.d, y.d)};
    }
    static D mul(D x, D y) {
        return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b), _mm256_mul_pd(x.c, y.c),
                _mm256_mul_pd(x.d, y.d)};
    }
    static void store(D x, double* to) {
        _mm256_storeu_pd(to, x.a);
        _mm256_storeu_pd(to + 4, x.b);
        _mm256_storeu_pd(to + 8, x.c);
        _mm256_storeu_pd(to + 12, x.d);
    }
};

}  // namespace
}  // namespace mrem
