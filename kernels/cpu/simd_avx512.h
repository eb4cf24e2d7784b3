// Sixteen floats in one AVX-512 register; Foundation instructions only.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace mrem {
namespace {

struct Avx512 {
    using F = __m512;
    struct D {
        __m512d a, b;
    };
    using M = __mmask16;

    static F all(float value) { return _mm512_set1_ps(value); }
    static F load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(F x, float* to) { _mm512_storeu_ps(to, x); }
    static void store_past_cache(F x, float* to) { _mm512_stream_ps(to, x); }
    static void fence() { _mm_sfence(); }
    static M first(std::size_t n) { return static_cast<M>((1u << n) - 1); }  // n at most 16
    static F load_first(const float* from, std::size_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
    static void store_first(F x, float* to, std::size_t n) { _mm512_mask_storeu_ps(to, first(n), x); }
    static F keep_first(F x, std::size_t n) { return _mm512_maskz_mov_ps(first(n), x); }

    static F add(F x, F y) { return _mm512_add_ps(x, y); }
    static F sub(F x, F y) { return _mm512_sub_ps(x, y); }
    static F mul(F x, F y) { return _mm512_mul_ps(x, y); }
    static F div(F x, F y) { return _mm512_div_ps(x, y); }
    static F abs(F x) { return _mm512_abs_ps(x); }
    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // min and max return their second operand if one is NaN. So x comes second, and NaN stays.
    static F clamp(F x, F low, F high) { return _mm512_min_ps(high, _mm512_max_ps(low, x)); }
    static M greater(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
    static F where(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

    static D zeros() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    static D widen(F x) {
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(upper)};
    }
    static D add(D x, D y) { return {_mm512_add_pd(x.a, y.a), _mm512_add_pd(x.b, y.b)}; }
    static D mul(D x, D y) { return {_mm512_mul_pd(x.a, y.a), _mm512_mul_pd(x.b, y.b)}; }
    static void store(D x, double* to) {
        _mm512_storeu_pd(to, x.a);
        _mm512_storeu_pd(to + 8, x.b);
    }
};

}  // namespace
}  // namespace mrem
