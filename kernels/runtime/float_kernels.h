// What the blocks compute in float, as one table of functions for every instruction set.
//
// Note: every target gives the same bits. Each formula is written once, in float_scalar.cpp, as a sequence of
// single roundings, and the vector versions follow it: a product and a sum that belong together are one fma
// (std::fma there), all others are rounded one by one. Sums run in sixteen lanes (element i belongs to lane
// i % 16), and `add_lanes` adds the lanes in one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm_kernels.h"

namespace mrem::runtime {

// Codes of activations: clamp(round_half_even(x / scale) + zero_point, low, high), with 0 <= low <= high <=
// 255. The division is a true one (a correctly rounded substitute by fma is fine). NaN gives `low`, which is
// what QuantizeLinear gives on x86 when low is 0.
struct Grid {
    float scale = 1.0f;
    std::int32_t zero_point = 0, low = 0, high = 255;
};

// score[row][i] = sums[row][i] − offsets[i], plus what is the same for a whole row and makes no difference to
// a softmax. Many rows at once, so that a processor can work on one while it waits for the sum of another.
struct Scores {
    const std::int32_t* sums;
    std::size_t rows, n, stride;  // stride >= n
    const std::int32_t* offsets;  // [n]
    float scale;
};

// y[row][c] = float(sums[row][c] + shifts[row] − offset of c) · scale of c + bias of c, rounded after each
// step.
struct SumRows {
    const std::int32_t* sums;
    std::size_t rows, columns, stride;  // readable to the end of the last panel
    const Columns* by;                  // of each panel of columns
    const std::int32_t* shifts;         // [rows]; or null: zeros
};

// A row of packed codes: code i in byte i / F, F = 8 / bits, lowest bits first. Each stands for (spacing ·
// code + low) · scale, and spacing · code + low has at most nine bits.
struct PackedRow {
    const std::uint8_t* bytes;
    int bits, spacing, low;
    float scale;
};

// Pointers to n values each. `y` may be `x`; apart from that nothing overlaps.
struct FloatKernels {
    const char* name;

    // The values of a row; `added`, if it is not null, is added to them.
    void (*expand)(const PackedRow& row, const float* added, std::size_t n, float* y);

    void (*quantize)(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes);

    // x · Φ(x), with Φ by the error function: Q(a) = erfc(a / √2) / 2 from a table of polynomials.
    void (*gelu)(const float* x, std::size_t n, float* y);

    // Codes of gelu(x) · (1 / grid.scale), which is not divided any more.
    void (*gelu_quantize)(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes);

    // y = (z − mean) / sqrt(variance + epsilon) · gamma + beta for each row of n values, z = x + residual (z
    // = x if `residual` is null).
    void (*layer_norm)(std::size_t rows, const float* const* x, const float* const* residual, std::size_t n,
                       const float* gamma, const float* beta, float epsilon, float* const* y);

    // quantize(y), or gelu_quantize(y), of sums
    void (*quantize_sums)(const SumRows& sums, const Grid& grid, bool gelu, std::uint8_t* codes,
                          std::size_t codes_stride);

    // In place, one row.
    void (*softmax)(float* x, std::size_t n);

    // Codes of the softmax of every row. With s the integer scores, d = max(s − largest s, −power_reach) and
    // e = 2^(d · power_factor), each code is that of the ratio e · (1 / (Σ e · grid.scale)). `work` has room
    // for rows · stride floats.
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

// GELU: a = min(|x|, kGeluMost), i = round(fma(a, kGeluSteps, 0)), r = fma(a, kGeluSteps, −i); Q = Σ
// kGeluTable[d][i] · r^d by Horner with fma, then fma(−a, Q, max(x, 0)). Polynomials of degree 4 on 16
// segments of width 0.35: the largest error of GELU over all floats in ±8 is 2.4e-7, half a unit in the last
// place of 4.
constexpr float kGeluMost = 5.4f, kGeluSteps = 2.86851859f;
constexpr int kGeluDegree = 4;
constexpr float kGeluTable[kGeluDegree + 1][16] = {
    {5.000000000e-01f, 3.636902869e-01f, 2.428313196e-01f, 1.478183866e-01f, 8.159118891e-02f,
     4.066156968e-02f, 1.823393255e-02f, 7.337858435e-03f, 2.644401509e-03f, 8.519528783e-04f,
     2.450405736e-04f, 6.285071140e-05f, 1.436266120e-05f, 2.922023441e-06f, 5.289113005e-07f,
     8.513391947e-08f},
    {-1.390756071e-01f, -1.308761090e-01f, -1.090667248e-01f, -8.049056679e-02f, -5.260388553e-02f,
     -3.044452891e-02f, -1.560334023e-02f, -7.081754971e-03f, -2.846273128e-03f, -1.013029017e-03f,
     -3.192813892e-04f, -8.911032637e-05f, -2.202323230e-05f, -4.819789865e-06f, -9.340371889e-07f,
     -1.602816297e-07f},
    {-6.653258424e-06f, 7.953628898e-03f, 1.325467601e-02f, 1.467261743e-02f, 1.278555673e-02f,
     9.249683470e-03f, 5.688855890e-03f, 3.012354253e-03f, 1.383719034e-03f, 5.540686543e-04f,
     1.940413349e-04f, 5.957537724e-05f, 1.606343358e-05f, 3.808757356e-06f, 7.949616929e-07f,
     1.461766033e-07f},
    {2.850143472e-03f, 2.317822073e-03f, 1.134021906e-03f, -1.456793980e-04f, -9.965136414e-04f,
     -1.249877154e-03f, -1.064205426e-03f, -7.114798645e-04f, -3.926063364e-04f, -1.830755791e-04f,
     -7.309712237e-05f, -2.519543887e-05f, -7.538265436e-06f, -1.965277988e-06f, -4.477224422e-07f,
     -8.932187257e-08f},
    {-6.891935482e-05f, -2.346040710e-04f, -3.352495842e-04f, -2.809890138e-04f, -1.358348236e-04f,
     3.112272225e-06f, 7.840411126e-05f, 8.961461572e-05f, 6.680589286e-05f, 3.846501204e-05f,
     1.809199239e-05f, 7.136599834e-06f, 2.395956926e-06f, 6.909483545e-07f, 1.722263079e-07f,
     3.727092945e-08f}};

// exp(x) for x <= 0: n = round(x · kLog2E), r = fma(−n, kLn2Low, fma(−n, kLn2High, x)), a polynomial in r
// (Cephes expf), times 2^n; 0 below kExpLeast. Largest relative error 1.2e-7.
constexpr float kExpLeast = -87.0f, kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExp[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// 2^(d · c) for whole numbers d <= 0: n = round(d · c), r = d · c − n, both by one fma; a polynomial in r by
// Horner with fma (the last coefficient is 1), times 2^n. Largest relative error 1.5e-7.
constexpr float kPower[6] = {1.326940488e-03f, 9.671294130e-03f, 5.550711229e-02f,
                             2.402224690e-01f, 6.931470037e-01f, 1.0f};
// Below 2^−125 a power counts as that: c for a scale of scores, and the largest −d for c.
constexpr float kPowerMost = 125.0f;
static inline float power_factor(float scale) {
    const float c = scale * kLog2E;
    return c > 0.0f ? (c < kPowerMost ? c : kPowerMost) : 0.0f;  // NaN: 0
}
static inline std::int32_t power_reach(float c) {
    const float reach = kPowerMost / c;
    return reach < 0x1p30f ? static_cast<std::int32_t>(reach) : 1 << 30;
}

// 1.5 · 2^23: adding it to a float below 2^22 in magnitude rounds it to an integer, half to even, which the
// low bits then hold.
constexpr float kRounder = 12582912.0f;

// One row.
inline void layer_norm(const FloatKernels& kernels, const float* x, const float* residual, std::size_t n,
                       const float* gamma, const float* beta, float epsilon, float* y) {
    kernels.layer_norm(1, &x, residual == nullptr ? nullptr : &residual, n, gamma, beta, epsilon, &y);
}

}  // namespace mrem::runtime
