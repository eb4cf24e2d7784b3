// What the targets with AVX-512 share: unpacking, floats of sums, and the operands of attention.
#pragma once

#include <immintrin.h>

#include "gemm_plain.h"
#include "unroll.h"

namespace mrem::runtime {
namespace {

// Field f of 64 packed bytes as signed bytes.
template <int kBits>
class Fields {
  public:
    explicit Fields(const Coding& coding) : mask_(_mm512_set1_epi8(kBits == 8 ? -128 : 15)) {
        alignas(16) std::int8_t values[16];
        for (int u = 0; u < 16; ++u) {
            values[u] = static_cast<std::int8_t>(coding.spacing * (u & ((1 << kBits) - 1)) + coding.low);
        }
        table_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    }
    __m512i operator()(__m512i codes, int f) const {
        if constexpr (kBits == 8) return _mm512_xor_si512(codes, mask_);  // u − 128
        // Values repeat in the table with a period of four where codes have two bits, so the bits above a
        // code need not be masked, only the top bit of the byte, which would clear the result.
        if (f > 0) codes = _mm512_srli_epi16(codes, static_cast<unsigned>(kBits * f));
        return _mm512_shuffle_epi8(table_, _mm512_and_si512(codes, mask_));
    }

  private:
    __m512i mask_, table_;
};

template <int kBits>
void unpack_fields(const std::uint8_t* packed, std::size_t steps, const Coding& coding, std::int8_t* b) {
    const Fields<kBits> field(coding);
    for (std::size_t s = 0; s < steps; ++s, packed += kStepBytes) {
        const __m512i codes = _mm512_loadu_si512(packed);
        MREM_UNROLLED
        for (int f = 0; f < 8 / kBits; ++f, b += kStepBytes) _mm512_store_si512(b, field(codes, f));
    }
}

void unpack512(const std::uint8_t* packed, std::size_t steps, const Coding& coding, std::int8_t* b) {
    if (coding.bits == 8) return unpack_fields<8>(packed, steps, coding, b);
    if (coding.bits == 4) return unpack_fields<4>(packed, steps, coding, b);
    unpack_fields<2>(packed, steps, coding, b);
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
