// What the targets with AVX-512 share: unpacking, floats of sums, and the operands of attention.
#pragma once

#include <immintrin.h>

#include "gemm_plain.h"

namespace mrem::runtime {
namespace {

void unpack512(const std::uint8_t* packed, std::size_t steps, const Coding& coding, std::int8_t* b) {
    if (coding.bits == 8) {  // u − 128
        const __m512i top = _mm512_set1_epi8(static_cast<char>(0x80));
        for (std::size_t s = 0; s < steps; ++s, packed += kStepBytes, b += kStepBytes) {
            _mm512_store_si512(b, _mm512_xor_si512(_mm512_loadu_si512(packed), top));
        }
        return;
    }
    alignas(16) std::int8_t values[16];
    for (int u = 0; u < 16; ++u) {
        values[u] = static_cast<std::int8_t>(coding.spacing * (u & ((1 << coding.bits) - 1)) + coding.low);
    }
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    if (coding.bits == 4) {
        const __m512i mask = _mm512_set1_epi8(15);
        for (std::size_t s = 0; s < steps; ++s, packed += kStepBytes, b += 2 * kStepBytes) {
            const __m512i u = _mm512_loadu_si512(packed);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(u, 4), mask);
            _mm512_store_si512(b, _mm512_shuffle_epi8(table, _mm512_and_si512(u, mask)));
            _mm512_store_si512(b + kStepBytes, _mm512_shuffle_epi8(table, high));
        }
        return;
    }
    // Values repeat in the table with a period of four, so the bits above a code need not be masked, only the
    // top bit of the byte, which would clear the result.
    const __m512i mask = _mm512_set1_epi8(15);
    for (std::size_t s = 0; s < steps; ++s, packed += kStepBytes, b += 4 * kStepBytes) {
        const __m512i u = _mm512_loadu_si512(packed);
        for (int f = 0; f < 4; ++f) {
            const __m512i code = _mm512_and_si512(_mm512_srli_epi16(u, static_cast<unsigned>(2 * f)), mask);
            _mm512_store_si512(b + f * 64, _mm512_shuffle_epi8(table, code));
        }
    }
}

void dequantize512(std::size_t rows, std::size_t panels, const std::int32_t* sums, std::size_t sums_stride,
                   const Columns* columns, float* y, std::size_t y_stride) {
    for (std::size_t p = 0; p < panels; ++p) {
        const __m512i offset = _mm512_loadu_si512(columns[p].offset);
        const __m512 scale = _mm512_loadu_ps(columns[p].scale), bias = _mm512_loadu_ps(columns[p].bias);
        for (std::size_t row = 0; row < rows; ++row) {
            const __m512i sum = _mm512_loadu_si512(sums + row * sums_stride + p * kPanel);
            const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, offset));
            _mm512_storeu_ps(y + row * y_stride + p * kPanel,
                             _mm512_add_ps(_mm512_mul_ps(value, scale), bias));
        }
    }
}

void float_product512(std::size_t rows, std::size_t columns, std::size_t depth, const float* a,
                      std::size_t a_stride, const float* b, float* y) {
    for (std::size_t column = 0; column < columns; column += kPanel) {
        for (std::size_t row = 0; row < rows; row += 4) {
            const std::size_t left = rows - row;
            const float* r0 = a + row * a_stride;
            const float *r1 = left > 1 ? r0 + a_stride : r0, *r2 = left > 2 ? r1 + a_stride : r0;
            const float* r3 = left > 3 ? r2 + a_stride : r0;
            __m512 y0 = _mm512_setzero_ps(), y1 = y0, y2 = y0, y3 = y0;
            for (std::size_t i = 0; i < depth; ++i) {
                const __m512 w = _mm512_loadu_ps(b + i * columns + column);
                y0 = _mm512_fmadd_ps(_mm512_set1_ps(r0[i]), w, y0);
                y1 = _mm512_fmadd_ps(_mm512_set1_ps(r1[i]), w, y1);
                y2 = _mm512_fmadd_ps(_mm512_set1_ps(r2[i]), w, y2);
                y3 = _mm512_fmadd_ps(_mm512_set1_ps(r3[i]), w, y3);
            }
            float* to = y + row * columns + column;
            _mm512_storeu_ps(to, y0);
            if (left > 1) _mm512_storeu_ps(to + columns, y1);
            if (left > 2) _mm512_storeu_ps(to + 2 * columns, y2);
            if (left > 3) _mm512_storeu_ps(to + 3 * columns, y3);
        }
    }
}

}  // namespace
}  // namespace mrem::runtime
