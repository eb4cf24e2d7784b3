// What the blocks compute in float, as one table of functions for every instruction set.
//
// Note: every target gives the same bits. Each formula is written once, in float_scalar.cpp, as a sequence of
// single roundings, and the vector versions follow it: a product and a sum that belong together are one fma
// (std::fma there), all others are rounded one by one. Sums run in sixteen lanes (element i belongs to lane
// i % 16), and `add_lanes` adds the lanes in one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mrem::runtime {

// Codes of activations: clamp(round_half_even(x / scale) + zero_point, low, high), with 0 <= low <= high <=
// 255. The division is a true one (a correctly rounded substitute by fma is fine). NaN gives `low`, which is
// what QuantizeLinear gives on x86 when low is 0.
struct Grid {
    float scale = 1.0f;
    std::int32_t zero_point = 0, low = 0, high = 255;
};

// scores[row][i] = float(sums[row][i] + shifts[row] − offsets[i]) · scale. Many rows at once, so that a
// processor can work on one while it waits for the sum of another.
struct Scores {
    const std::int32_t* sums;
    std::size_t rows, n, stride;  // stride >= n
    const std::int32_t* shifts;   // [rows]
    const std::int32_t* offsets;  // [n]
    float scale;
};
constexpr std::size_t kMostScoreRows = 32;

// Pointers to n values each. `y` may be `x`; apart from that nothing overlaps.
struct FloatKernels {
    const char* name;

    void (*quantize)(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes);

    // x · Φ(x), with Φ by the error function: Q(a) = erfc(a / √2) / 2 from a table of polynomials.
    void (*gelu)(const float* x, std::size_t n, float* y);

    // quantize(gelu(x))
    void (*gelu_quantize)(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes);

    // y = (z − mean) / sqrt(variance + epsilon) · gamma + beta for one row z = x + residual (z = x if
    // `residual` is null).
    void (*layer_norm)(const float* x, const float* residual, std::size_t n, const float* gamma,
                       const float* beta, float epsilon, float* y);

    // In place, one row.
    void (*softmax)(float* x, std::size_t n);

    // quantize(softmax(scores)) of every row. `work` has room for rows · stride floats.
    void (*softmax_quantize)(const Scores& scores, const Grid& grid, float* work, std::uint8_t* codes,
                             std::size_t codes_stride);
};

extern const FloatKernels kScalarFloats;
#ifdef MREM_RUNTIME_HAVE_FLOATS_AVX2
extern const FloatKernels kAvx2Floats;  // needs AVX2 and FMA
#endif
#ifdef MREM_RUNTIME_HAVE_FLOATS_AVX512
extern const FloatKernels kAvx512Floats;  // needs AVX-512 F, BW, DQ, VL
#endif

// ------------------------------------------------------------------------------------- what all targets use

constexpr std::size_t kFloatLanes = 16;

// GELU: a = min(|x|, kGeluMost), t = a · kGeluSteps, i = round(t), r = t − i; Q = Σ kGeluTable[d][i] · r^d by
// Horner with fma, then fma(−a, Q, max(x, 0)). Polynomials of degree 5 on 16 segments of width 0.36: the
// largest error of GELU over all floats in ±8 is 2.4e-7, half a unit in the last place of 4.
constexpr float kGeluMost = 5.5764f, kGeluSteps = 1.0f / 0.36f;
constexpr int kGeluDegree = 5;
constexpr float kGeluTable[kGeluDegree + 1][16] = {
    {5.000000000e-01f, 3.594235778e-01f, 2.357625067e-01f, 1.400710940e-01f, 7.493370026e-02f,
     3.593031690e-02f, 1.538633369e-02f, 5.867741071e-03f, 1.988375792e-03f, 5.976486718e-04f,
     1.591087639e-04f, 3.747497612e-05f, 7.801500033e-06f, 1.434388082e-06f, 2.327696507e-07f,
     3.332131371e-08f},
    {-1.436192244e-01f, -1.346078217e-01f, -1.108264551e-01f, -8.015526086e-02f, -5.092559010e-02f,
     -2.842205763e-02f, -1.393446792e-02f, -6.001235917e-03f, -2.270421246e-03f, -7.545494009e-04f,
     -2.202847245e-04f, -5.649326340e-05f, -1.272695681e-05f, -2.518652309e-06f, -4.378524068e-07f,
     -6.686569520e-08f},
    {1.099064742e-15f, 8.722391911e-03f, 1.436287165e-02f, 1.558206230e-02f, 1.319994312e-02f,
     9.208849631e-03f, 5.417808890e-03f, 2.722197445e-03f, 1.176985097e-03f, 4.400387406e-04f,
     1.427320094e-04f, 4.026148235e-05f, 9.893583410e-06f, 2.120738372e-06f, 3.969495310e-07f,
     6.493068838e-08f},
    {3.102124669e-03f, 2.530683298e-03f, 1.152890269e-03f, -2.880621178e-04f, -1.180924941e-03f,
     -1.375167863e-03f, -1.103298622e-03f, -6.935657584e-04f, -3.577309544e-04f, -1.547951397e-04f,
     -5.690630496e-05f, -1.791413524e-05f, -4.854793588e-06f, -1.136891342e-06f, -2.306977933e-07f,
     -4.064975201e-08f},
    {-5.024295782e-15f, -2.683184575e-04f, -3.824249143e-04f, -3.072934633e-04f, -1.323935139e-04f,
     2.276227315e-05f, 9.652116569e-05f, 9.810919437e-05f, 6.731558824e-05f, 3.578777614e-05f,
     1.548784530e-05f, 5.588658041e-06f, 1.704736178e-06f, 4.434375569e-07f, 9.895025954e-08f,
     1.902228597e-08f},
    {-5.990085992e-05f, -4.194946814e-05f, -2.548348220e-06f, 2.931367817e-05f, 3.643217497e-05f,
     2.360013423e-05f, 6.369966741e-06f, -4.300783985e-06f, -6.956782272e-06f, -5.297596545e-06f,
     -2.882988156e-06f, -1.233370540e-06f, -4.313571367e-07f, -1.258892581e-07f, -3.103958335e-08f,
     -6.518557250e-09f}};

// exp(x) for x <= 0: n = round(x · kLog2E), r = fma(−n, kLn2Low, fma(−n, kLn2High, x)), a polynomial in r
// (Cephes expf), times 2^n; 0 below kExpLeast. Largest relative error 1.2e-7.
constexpr float kExpLeast = -87.0f, kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExp[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// 1.5 · 2^23: adding it to a float below 2^22 in magnitude rounds it to an integer, half to even, which the
// low bits then hold.
constexpr float kRounder = 12582912.0f;

}  // namespace mrem::runtime
