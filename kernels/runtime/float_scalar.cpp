// The formulas that every target follows (float_kernels.h), in plain C++.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "float_kernels.h"

namespace mrem::runtime {
namespace {

std::uint8_t code_of_ratio(float ratio, const Grid& grid) {
    const float least = static_cast<float>(grid.low - grid.zero_point);
    const float most = static_cast<float>(grid.high - grid.zero_point);
    ratio = ratio > least ? ratio : least;  // NaN: least
    ratio = ratio < most ? ratio : most;
    return static_cast<std::uint8_t>(static_cast<std::int32_t>((ratio + kRounder) - kRounder) +
                                     grid.zero_point);
}

std::uint8_t code_of(float x, const Grid& grid) { return code_of_ratio(x / grid.scale, grid); }

float gelu_of(float x) {
    const float magnitude = std::fabs(x);
    const float a = magnitude < kGeluMost ? magnitude : kGeluMost;
    const float whole = std::fma(a, kGeluSteps, kRounder) - kRounder, r = std::fma(a, kGeluSteps, -whole);
    const int i = static_cast<int>(whole);
    float q = kGeluTable[kGeluDegree][i];
    for (int d = kGeluDegree - 1; d >= 0; --d) q = std::fma(q, r, kGeluTable[d][i]);
    return std::fma(-a, q, x < 0.0f ? 0.0f : x);
}

float exp_of(float x) {
    if (!(x >= kExpLeast)) return x < kExpLeast ? 0.0f : x;  // NaN stays
    const float n = (x * kLog2E + kRounder) - kRounder;
    const float r = std::fma(-n, kLn2Low, std::fma(-n, kLn2High, x));
    float p = kExp[0];
    for (int d = 1; d < 6; ++d) p = std::fma(p, r, kExp[d]);
    const float y = std::fma(p, r * r, r) + 1.0f;
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}

// 2^(d · factor)
float power_of(float d, float factor) {
    const float n = std::fma(d, factor, kRounder) - kRounder, r = std::fma(d, factor, -n);
    float y = kPower[0];
    for (int i = 1; i < 6; ++i) y = std::fma(y, r, kPower[i]);
    std::uint32_t bits;
    std::memcpy(&bits, &y, sizeof bits);
    bits += static_cast<std::uint32_t>(static_cast<std::int32_t>(n)) << 23;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

float add_lanes(float* lanes) {
    for (std::size_t width = kFloatLanes / 2; width > 0; width /= 2) {
        for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

void expand(const PackedRow& row, const float* added, std::size_t n, float* y) {
    const auto fields = static_cast<std::size_t>(8 / row.bits);
    for (std::size_t i = 0; i < n; ++i) {
        const int shift = static_cast<int>(i % fields) * row.bits;
        const int code = row.bytes[i / fields] >> shift & ((1 << row.bits) - 1);
        y[i] = static_cast<float>(row.spacing * code + row.low) * row.scale;
        if (added != nullptr) y[i] += added[i];
    }
}

void quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    for (std::size_t i = 0; i < n; ++i) codes[i] = code_of(x[i], grid);
}

void gelu(const float* x, std::size_t n, float* y) {
    for (std::size_t i = 0; i < n; ++i) y[i] = gelu_of(x[i]);
}

std::uint8_t gelu_code_of(float x, const Grid& grid) {
    return code_of_ratio(gelu_of(x) * (1.0f / grid.scale), grid);
}

void gelu_quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    for (std::size_t i = 0; i < n; ++i) codes[i] = gelu_code_of(x[i], grid);
}

void norm_row(const float* x, const float* residual, std::size_t n, const float* gamma, const float* beta,
              float epsilon, float* y) {
    float sums[kFloatLanes] = {}, squares[kFloatLanes] = {};
    const auto at = [&](std::size_t i) { return residual != nullptr ? x[i] + residual[i] : x[i]; };
    for (std::size_t i = 0; i < n; ++i) sums[i % kFloatLanes] += at(i);
    const float mean = add_lanes(sums) / static_cast<float>(n);
    for (std::size_t i = 0; i < n; ++i) {
        const float d = at(i) - mean;
        float& sum = squares[i % kFloatLanes];
        sum = std::fma(d, d, sum);
    }
    const float inverse = 1.0f / std::sqrt(add_lanes(squares) / static_cast<float>(n) + epsilon);
    for (std::size_t i = 0; i < n; ++i) y[i] = std::fma((at(i) - mean) * inverse, gamma[i], beta[i]);
}

void layer_norm(std::size_t rows, const float* const* x, const float* const* residual, std::size_t n,
                const float* gamma, const float* beta, float epsilon, float* const* y) {
    for (std::size_t row = 0; row < rows; ++row) {
        norm_row(x[row], residual == nullptr ? nullptr : residual[row], n, gamma, beta, epsilon, y[row]);
    }
}

void softmax(float* x, std::size_t n) {
    float most = -INFINITY, lanes[kFloatLanes] = {};
    for (std::size_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
    for (std::size_t i = 0; i < n; ++i) lanes[i % kFloatLanes] += (x[i] = exp_of(x[i] - most));
    const float inverse = 1.0f / add_lanes(lanes);
    for (std::size_t i = 0; i < n; ++i) x[i] *= inverse;
}

void quantize_sums(const SumRows& sums, const Grid& grid, bool gelu, std::uint8_t* codes,
                   std::size_t codes_stride) {
    for (std::size_t row = 0; row < sums.rows; ++row, codes += codes_stride) {
        const std::int32_t shift = sums.shifts != nullptr ? sums.shifts[row] : 0;
        for (std::size_t c = 0; c < sums.columns; ++c) {
            const Columns& by = sums.by[c / kPanel];
            const std::int32_t sum = sums.sums[row * sums.stride + c] + shift - by.offset[c % kPanel];
            const float product = static_cast<float>(sum) * by.scale[c % kPanel];
            const float y = product + by.bias[c % kPanel];
            codes[c] = gelu ? gelu_code_of(y, grid) : code_of(y, grid);
        }
    }
}

void softmax_quantize(const Scores& scores, const Grid& grid, float* work, std::uint8_t* codes,
                      std::size_t codes_stride) {
    const float factor = power_factor(scores.scale);
    const std::int32_t least = -power_reach(factor);
    for (std::size_t row = 0; row < scores.rows; ++row, codes += codes_stride) {
        const std::int32_t* sums = scores.sums + row * scores.stride;
        std::int32_t most = INT32_MIN;
        for (std::size_t i = 0; i < scores.n; ++i) most = std::max(most, sums[i] - scores.offsets[i]);
        float lanes[kFloatLanes] = {};
        for (std::size_t i = 0; i < scores.n; ++i) {
            const std::int32_t d = std::max(sums[i] - scores.offsets[i] - most, least);
            work[i] = power_of(static_cast<float>(d), factor);
            lanes[i % kFloatLanes] += work[i];
        }
        const float inverse = 1.0f / (add_lanes(lanes) * grid.scale);
        for (std::size_t i = 0; i < scores.n; ++i) codes[i] = code_of_ratio(work[i] * inverse, grid);
    }
}

}  // namespace

const FloatKernels kScalarFloats = {"scalar",      expand,  quantize,        gelu, gelu_quantize, layer_norm,
                                    quantize_sums, softmax, softmax_quantize};

}  // namespace mrem::runtime
