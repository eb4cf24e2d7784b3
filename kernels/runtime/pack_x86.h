// The operands of attention on x86-64: transposes of 4-byte quads and of bytes by SSE2 unpacking.
#pragma once

#include <emmintrin.h>

#include "gemm_plain.h"

namespace mrem::runtime {
namespace {

// Sixteen bytes of a row, shifted by 128; zeros beyond `count` of them. Reads nothing beyond.
inline __m128i sixteen_of(const std::uint8_t* codes, std::size_t count) {
    const __m128i top = _mm_set1_epi8(static_cast<char>(0x80));
    if (count >= 16) return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), top);
    alignas(16) std::uint8_t first[16];
    for (std::size_t i = 0; i < 16; ++i) first[i] = i < count ? codes[i] : 128;
    return _mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(first)), top);
}

inline std::size_t left_of(std::size_t all, std::size_t from) { return all > from ? all - from : 0; }

// Four tokens by sixteen inputs at a time: a 4 × 4 transpose of quads.
[[maybe_unused]] void pack_keys_x86(const std::uint8_t* codes, std::size_t stride, std::size_t tokens,
                                    std::size_t width, std::size_t quads, std::int8_t* b,
                                    std::int32_t* sums) {
    const std::size_t size = quads * kStepBytes, all = round_up(tokens, kPanel);
    for (std::size_t token = 0; token < all; token += 4) {
        std::int8_t* panel = b + token / kPanel * size + token % kPanel * kQuad;
        __m128i total = _mm_setzero_si128();
        for (std::size_t quad = 0; quad < quads; quad += 4) {
            const std::size_t from = quad * kQuad, count = left_of(width, from);
            __m128i row[4];
            for (std::size_t i = 0; i < 4; ++i) {
                row[i] = token + i < tokens && count > 0
                             ? sixteen_of(codes + (token + i) * stride + from, count)
                             : _mm_setzero_si128();
            }
            const __m128i a = _mm_unpacklo_epi32(row[0], row[1]), c = _mm_unpackhi_epi32(row[0], row[1]);
            const __m128i d = _mm_unpacklo_epi32(row[2], row[3]), e = _mm_unpackhi_epi32(row[2], row[3]);
            const __m128i turned[4] = {_mm_unpacklo_epi64(a, d), _mm_unpackhi_epi64(a, d),
                                       _mm_unpacklo_epi64(c, e), _mm_unpackhi_epi64(c, e)};
            const __m128i ones = _mm_set1_epi16(1);
            for (std::size_t i = 0; i < 4 && quad + i < quads; ++i) {
                _mm_store_si128(reinterpret_cast<__m128i*>(panel + (quad + i) * kStepBytes), turned[i]);
                // Bytes to 16 bits with their sign, then pairs to 32.
                const __m128i even = _mm_srai_epi16(_mm_slli_epi16(turned[i], 8), 8);
                const __m128i odd = _mm_srai_epi16(turned[i], 8);
                total = _mm_add_epi32(total, _mm_madd_epi16(_mm_add_epi16(even, odd), ones));
            }
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + token), total);
    }
}

// Four tokens by sixteen columns at a time: bytes interleaved.
[[maybe_unused]] void pack_values_x86(const std::uint8_t* codes, std::size_t stride, std::size_t tokens,
                                      std::size_t width, std::size_t quads, std::int8_t* b) {
    const std::size_t size = quads * kStepBytes;
    for (std::size_t quad = 0; quad < quads; ++quad) {
        const std::size_t token = quad * kQuad;
        for (std::size_t column = 0; column < width; column += kPanel) {
            __m128i row[4];
            for (std::size_t i = 0; i < 4; ++i) {
                row[i] = token + i < tokens
                             ? sixteen_of(codes + (token + i) * stride + column, width - column)
                             : _mm_setzero_si128();
            }
            const __m128i a = _mm_unpacklo_epi8(row[0], row[1]), c = _mm_unpackhi_epi8(row[0], row[1]);
            const __m128i d = _mm_unpacklo_epi8(row[2], row[3]), e = _mm_unpackhi_epi8(row[2], row[3]);
            __m128i* to = reinterpret_cast<__m128i*>(b + column / kPanel * size + quad * kStepBytes);
            _mm_store_si128(to, _mm_unpacklo_epi16(a, d));
            _mm_store_si128(to + 1, _mm_unpackhi_epi16(a, d));
            _mm_store_si128(to + 2, _mm_unpacklo_epi16(c, e));
            _mm_store_si128(to + 3, _mm_unpackhi_epi16(c, e));
        }
    }
}

}  // namespace
}  // namespace mrem::runtime
