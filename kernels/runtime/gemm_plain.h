// The microkernels in plain C++: the reference, and what a target uses that has nothing better.
//
// Note: all of it is in an unnamed namespace and calls no std:: function. The linker would merge an inline
// function with external linkage with its twin from another file, and portable code would then run the one
// compiled for AVX-512.
#pragma once

#include <math.h>
#include <string.h>

#include "gemm_kernels.h"

namespace mrem::runtime {
namespace {

[[maybe_unused]] void plain_unpack(const std::uint8_t* packed, std::size_t steps, const Coding& coding,
                                   std::int8_t* b) {
    const int bits = coding.bits, mask = (1 << bits) - 1;
    for (std::size_t s = 0; s < steps; ++s, packed += kStepBytes) {
        for (int shift = 0; shift < 8; shift += bits, b += kStepBytes) {
            for (std::size_t i = 0; i < kStepBytes; ++i) {
                b[i] = static_cast<std::int8_t>((packed[i] >> shift & mask) * coding.spacing + coding.low);
            }
        }
    }
}

// One row and one panel at a time, with the columns innermost, where a compiler finds them.
[[maybe_unused]] void plain_tile(std::size_t rows, std::size_t panels, const Tile& tile) {
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t panel = 0; panel < panels; ++panel) {
            std::int32_t* sums = tile.sums + row * tile.sums_stride + panel * kPanel;
            std::int32_t acc[kPanel] = {};
            const std::uint8_t* a = tile.a + row * tile.a_stride;
            const std::int8_t* b = tile.b + panel * tile.b_stride;
            for (std::size_t quad = 0; quad < tile.quads; ++quad, a += kQuad, b += kStepBytes) {
                for (std::size_t c = 0; c < kPanel; ++c) {
                    acc[c] +=
                        a[0] * b[4 * c] + a[1] * b[4 * c + 1] + a[2] * b[4 * c + 2] + a[3] * b[4 * c + 3];
                }
            }
            for (std::size_t c = 0; c < kPanel; ++c) sums[c] = tile.add ? sums[c] + acc[c] : acc[c];
        }
    }
}

[[maybe_unused]] void plain_dequantize(std::size_t rows, std::size_t panels, const std::int32_t* sums,
                                       std::size_t sums_stride, const Columns* columns, float* y,
                                       std::size_t y_stride) {
    for (std::size_t row = 0; row < rows; ++row, sums += sums_stride, y += y_stride) {
        for (std::size_t panel = 0; panel < panels; ++panel) {
            const Columns& by = columns[panel];
            for (std::size_t c = 0; c < kPanel; ++c) {
                const float product =
                    static_cast<float>(sums[panel * kPanel + c] - by.offset[c]) * by.scale[c];
                y[panel * kPanel + c] = product + by.bias[c];
            }
        }
    }
}

[[maybe_unused]] void plain_pack_keys(const std::uint8_t* codes, std::size_t stride, std::size_t tokens,
                                      std::size_t width, std::size_t quads, std::int8_t* b,
                                      std::int32_t* sums) {
    const std::size_t all = round_up(tokens, kPanel), size = quads * kStepBytes;
    for (std::size_t token = 0; token < all; ++token) {
        std::int8_t* column = b + token / kPanel * size + token % kPanel * kQuad;
        std::int32_t sum = 0;
        for (std::size_t i = 0; i < quads * kQuad; ++i) {
            const int value = token < tokens && i < width ? codes[token * stride + i] - 128 : 0;
            column[i / kQuad * kStepBytes + i % kQuad] = static_cast<std::int8_t>(value);
            sum += value;
        }
        sums[token] = sum;
    }
}

[[maybe_unused]] void plain_pack_values(const std::uint8_t* codes, std::size_t stride, std::size_t tokens,
                                        std::size_t width, std::size_t quads, std::int8_t* b) {
    const std::size_t columns = round_up(width, kPanel), size = quads * kStepBytes;
    for (std::size_t token = 0; token < quads * kQuad; ++token) {
        std::int8_t* row = b + token / kQuad * kStepBytes + token % kQuad;
        for (std::size_t c = 0; c < columns; ++c) {
            const int value = token < tokens && c < width ? codes[token * stride + c] - 128 : 0;
            row[c / kPanel * size + c % kPanel * kQuad] = static_cast<std::int8_t>(value);
        }
    }
}

[[maybe_unused]] void plain_float_product(std::size_t rows, std::size_t columns, std::size_t depth,
                                          const float* a, std::size_t a_stride, const float* b, float* y) {
    for (std::size_t row = 0; row < rows; ++row, a += a_stride, y += columns) {
        for (std::size_t c = 0; c < columns; ++c) y[c] = 0.0f;
        for (std::size_t i = 0; i < depth; ++i) {
            for (std::size_t c = 0; c < columns; ++c) y[c] = ::fmaf(a[i], b[i * columns + c], y[c]);
        }
    }
}

}  // namespace
}  // namespace mrem::runtime
