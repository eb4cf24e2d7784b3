// The sum of a row of codes.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace mrem::runtime {

inline std::int32_t sum_of_bytes(const std::uint8_t* codes, std::size_t n) {
    std::int32_t sum = 0;
    std::size_t i = 0;
#ifdef __SSE2__
    __m128i halves = _mm_setzero_si128();
    for (; i + 16 <= n; i += 16) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        halves = _mm_add_epi64(halves, _mm_sad_epu8(some, _mm_setzero_si128()));
    }
    sum = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves)));
#endif
    for (; i < n; ++i) sum += codes[i];
    return sum;
}

}  // namespace mrem::runtime
