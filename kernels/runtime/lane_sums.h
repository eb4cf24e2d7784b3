// The sum and the largest of eight floats. The order of the sum is that of add_lanes in float_scalar.cpp: the
// upper half is added to the lower one, again and again.
#pragma once

#include <immintrin.h>

namespace mrem::runtime {
namespace {

inline float total_of(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// None of them is NaN.
inline float largest_of(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
}  // namespace mrem::runtime
