// What the targets with registers of 256 bits share: unpacking, floats of sums, and the operands of
// attention.
#pragma once

#include <immintrin.h>

#include "gemm_plain.h"

namespace mrem::runtime {
namespace {

__m256i load256(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }
__m256i loadu256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
void store256(void* to, __m256i value) { _mm256_store_si256(static_cast<__m256i*>(to), value); }

void unpack256(const std::uint8_t* packed, std::size_t steps, const Coding& coding, std::int8_t* b) {
    const std::size_t halves = 2 * steps;
    if (coding.bits == 8) {  // u − 128
        const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
        for (std::size_t i = 0; i < halves; ++i) {
            store256(b + i * 32, _mm256_xor_si256(loadu256(packed + i * 32), top));
        }
        return;
    }
    // Values repeat in the table where codes have two bits, so that the bits above a code may stay; only the
    // top bit of a byte would clear the result.
    alignas(16) std::int8_t values[16];
    for (int u = 0; u < 16; ++u) {
        values[u] = static_cast<std::int8_t>(coding.spacing * (u & ((1 << coding.bits) - 1)) + coding.low);
    }
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    const int fields = 8 / coding.bits;
    for (std::size_t i = 0; i < halves; ++i, packed += 32) {
        const __m256i u = loadu256(packed);
        std::int8_t* to = b + (i / 2) * static_cast<std::size_t>(fields) * kStepBytes + i % 2 * 32;
        for (int f = 0; f < fields; ++f) {
            const __m256i code = _mm256_and_si256(_mm256_srli_epi16(u, f * coding.bits), mask);
            store256(to + f * 64, _mm256_shuffle_epi8(table, code));
        }
    }
}

void dequantize256(std::size_t rows, std::size_t panels, const std::int32_t* sums, std::size_t sums_stride,
                   const Columns* columns, float* y, std::size_t y_stride) {
    for (std::size_t half = 0; half < 2 * panels; ++half) {
        const Columns& by = columns[half / 2];
        const std::size_t at = half % 2 * 8, column = half * 8;
        const __m256i offset = loadu256(by.offset + at);
        const __m256 scale = _mm256_loadu_ps(by.scale + at), bias = _mm256_loadu_ps(by.bias + at);
        for (std::size_t row = 0; row < rows; ++row) {
            const __m256i sum = _mm256_sub_epi32(loadu256(sums + row * sums_stride + column), offset);
            const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale);
            _mm256_storeu_ps(y + row * y_stride + column, _mm256_add_ps(value, bias));
        }
    }
}

void float_product256(std::size_t rows, std::size_t columns, std::size_t depth, const float* a,
                      std::size_t a_stride, const float* b, float* y) {
    for (std::size_t column = 0; column < columns; column += 8) {
        for (std::size_t row = 0; row < rows; row += 4) {
            const std::size_t left = rows - row;
            const float* r0 = a + row * a_stride;
            const float *r1 = left > 1 ? r0 + a_stride : r0, *r2 = left > 2 ? r1 + a_stride : r0;
            const float* r3 = left > 3 ? r2 + a_stride : r0;
            __m256 y0 = _mm256_setzero_ps(), y1 = y0, y2 = y0, y3 = y0;
            for (std::size_t i = 0; i < depth; ++i) {
                const __m256 w = _mm256_loadu_ps(b + i * columns + column);
                y0 = _mm256_fmadd_ps(_mm256_set1_ps(r0[i]), w, y0);
                y1 = _mm256_fmadd_ps(_mm256_set1_ps(r1[i]), w, y1);
                y2 = _mm256_fmadd_ps(_mm256_set1_ps(r2[i]), w, y2);
                y3 = _mm256_fmadd_ps(_mm256_set1_ps(r3[i]), w, y3);
            }
            float* to = y + row * columns + column;
            _mm256_storeu_ps(to, y0);
            if (left > 1) _mm256_storeu_ps(to + columns, y1);
            if (left > 2) _mm256_storeu_ps(to + 2 * columns, y2);
            if (left > 3) _mm256_storeu_ps(to + 3 * columns, y3);
        }
    }
}

}  // namespace
}  // namespace mrem::runtime
