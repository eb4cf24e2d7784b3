// The microkernels that training is built on: one table of functions for every instruction set.
//
// They know only contiguous runs of floats; shapes, strides, blocks and threads are in training.cpp. The
// formulas are written once, in kernels_impl.h, and compiled for each instruction set by kernels_<isa>.cpp.
// All of them follow mrem_deploy/kernels/reference.py: a true division, round half to even, NaN stays NaN.
//
// Note: every sum runs in sixteen float64 lanes on every instruction set (element i belongs to lane i % 16),
// and the lanes are added in one fixed order. So a sum has the same bits on all of them, portable code
// included.
//
// All require: pointers to n floats each; an output may be one of the inputs, but not overlap otherwise.
#pragma once

#include <cstddef>

namespace mrem {

// The integers of a quantizer: clamp(round(x / scale), low, high), with low <= 0 <= high. The bounds include
// the zero point: they are low − z and high − z of the grid.
struct Range {
    float low, high;
};

// The magnitudes of codes that a threshold decides: (0, 1) for ternary weights, (1, 3) for midrise ones.
struct Levels {
    float inner, outer;
};

struct KeptSum {
    double sum, count;
};

struct LaqSums {
    double numerator, denominator;
};

struct Kernels {
    const char* name;

    // out = clamp(round(x / scale), low, high) · factor. A factor of 1 leaves the integers. With `past_cache`
    // results go directly to memory: for a tensor that is too large to be read again from a cache.
    void (*quantize)(const float* x, std::size_t n, float scale, Range range, float factor, bool past_cache,
                     float* out);

    // Gradients of LSQ. grad_x = grad where x is inside the range, else 0; returns Σ grad · dx̂/ds, each
    // product rounded to float32, their sum in float64.
    double (*quantize_backward)(const float* grad, const float* x, std::size_t n, float scale, Range range,
                                bool past_cache, float* grad_x);

    // out = (w < 0 ? −1 : 1) · (|w| > threshold ? outer : inner) · factor.
    // NaN stays NaN, except that with inner = 0 it becomes 0.
    void (*quantize_by_threshold)(const float* w, std::size_t n, float threshold, Levels levels, float factor,
                                  float* out);

    // product = product · scale + bias, each operation rounded; `scales` has n values or, if `one_scale`,
    // one; `bias` has n or is null.
    void (*scale_product)(float* product, std::size_t n, const float* scales, bool one_scale,
                          const float* bias);

    // Σ|w|
    double (*sum_magnitudes)(const float* w, std::size_t n);

    // Σ|w| and the number of those |w| that exceed the threshold.
    KeptSum (*sum_above)(const float* w, std::size_t n, float threshold);

    // Σ d·w·b and Σ d·b² with b = clamp(round(w / alpha), low, high); d = 1 where `diagonal` is null.
    LaqSums (*laq_sums)(const float* w, const float* diagonal, std::size_t n, float alpha, Range range);
};

extern const Kernels kScalarKernels;
#ifdef MREM_HAVE_AVX2
extern const Kernels kAvx2Kernels;
#endif
#ifdef MREM_HAVE_AVX512
extern const Kernels kAvx512Kernels;
#endif

}  // namespace mrem
