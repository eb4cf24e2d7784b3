// The training ops on entire tensors: shapes, strides, blocks and threads around the microkernels.
//
// Work is cut into blocks whose size does not depend on the number of threads, and partial sums are added in
// the order of the blocks. So the number of threads does not change a bit of the result.
//
// Note: the number of scales decides "per row". One scale is for the entire tensor. Several scales are for
// one row each, and then the tensor must be contiguous.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels.h"

namespace mrem {

// A tensor of up to four dimensions whose last one is contiguous; missing ones have size 1 and come first.
struct View {
    const float* data;
    std::array<std::size_t, 3> sizes;       // of all dimensions but the last
    std::array<std::ptrdiff_t, 3> strides;  // in floats
    std::size_t columns;                    // of the last dimension, at least 1

    std::size_t rows() const { return sizes[0] * sizes[1] * sizes[2]; }
    std::size_t size() const { return rows() * columns; }
    bool contiguous() const;
};

struct Scales {
    const float* values;
    std::size_t count;  // 1, or the number of rows

    float at(std::size_t row) const { return values[count == 1 ? 0 : row]; }
};

// out (contiguous) = clamp(round(x / s), low, high), times s if `dequantize`.
void quantize(const Kernels& kernels, const View& x, Scales scales, Range range, bool dequantize, float* out,
              int threads);

// grad_x (contiguous; may be `grad`, which is contiguous too) and grad_scale, as many as there are scales.
void quantize_backward(const Kernels& kernels, const float* grad, const View& x, Scales scales, Range range,
                       float* grad_x, float* grad_scale, int threads);

// out = ±(|w| > threshold ? outer : inner), times the factor; `factors` has as many values as `thresholds`,
// or is null for 1.
void quantize_by_threshold(const Kernels& kernels, const View& w, Scales thresholds, Levels levels,
                           const float* factors, float* out, int threads);

// product (rows, columns) = product · scale + bias in place; one scale or one per column; bias may be null.
void scale_product(const Kernels& kernels, float* product, std::size_t rows, std::size_t columns,
                   const float* scales, bool one_scale, const float* bias, int threads);

// TWN of a contiguous (rows, columns): threshold and scale, one or one per row.
void twn(const Kernels& kernels, const float* w, std::size_t rows, std::size_t columns, bool per_row,
         float* threshold, float* scale, int threads);

// Midrise of a contiguous (rows, columns): threshold and scale, one or one per row.
void midrise(const Kernels& kernels, const float* w, std::size_t rows, std::size_t columns, bool per_row,
             float* threshold, float* scale, int threads);

// LAQ of a contiguous (rows, columns): the scale, one or one per row; `start` has as many; `diagonal` may be
// null.
void laq(const Kernels& kernels, const float* w, const float* start, const float* diagonal, std::size_t rows,
         std::size_t columns, Range range, int iterations, bool per_row, float* scale, int threads);

}  // namespace mrem
