// The formulas of float_scalar.cpp on sixteen lanes. A file of an instruction set includes this with its
// lanes V and compiles it for itself.
//
// Note: everything here is in an unnamed namespace, and no inline function of the standard library with
// external linkage is called: the linker would merge it with its twin from portable code.
#pragma once

#include <math.h>

#include <cstring>

#include "float_kernels.h"

namespace mrem::runtime {
namespace {

// Sixteen elements, or the first few of them at the end of a row; nothing beyond is read or written.
template <class V>
struct Whole {
    typename V::F load(const float* from) const { return V::load(from); }
    typename V::I load(const std::int32_t* from) const { return V::load(from); }
    void store(typename V::F value, float* to) const { V::store(value, to); }
    void store(typename V::I codes, std::uint8_t* to) const { V::store_bytes(codes, to); }
    typename V::F keep(typename V::F value) const { return value; }
    typename V::F fill(typename V::F value, typename V::F) const { return value; }
};

template <class V>
struct Part {
    std::size_t count;
    typename V::F load(const float* from) const { return V::load_first(from, count); }
    typename V::I load(const std::int32_t* from) const { return V::load_first(from, count); }
    void store(typename V::F value, float* to) const { V::store_first(value, to, count); }
    void store(typename V::I codes, std::uint8_t* to) const {
        std::uint8_t bytes[kFloatLanes];
        V::store_bytes(codes, bytes);
        std::memcpy(to, bytes, count);
    }
    typename V::F keep(typename V::F value) const { return V::keep_first(value, count); }  // zeros beyond
    typename V::F fill(typename V::F value, typename V::F beyond) const {
        return V::fill_after(value, count, beyond);
    }
};

// body(i, lanes) for i = 0, 16, 32, …; the last may be a Part.
template <class V, class Body>
inline void by_lanes(std::size_t n, const Body& body) {
    std::size_t i = 0;
    for (; i + kFloatLanes <= n; i += kFloatLanes) body(i, Whole<V>{});
    if (i < n) body(i, Part<V>{n - i});
}

// Codes of a grid.
//
// Note: x / scale is computed without a division, and is still the correctly rounded quotient. 1 / scale is
// correctly rounded. x · (1 / scale) is within 1.5 units in the last place of the quotient; one step
// q + (x − q · scale) · (1 / scale) with fma brings it below one unit, and from there a second one gives the
// correctly rounded quotient (Markstein's theorem). It needs a scale far from the ends of the range, so that
// no remainder that matters is denormal, and quotients that do not overflow: x is clamped to ±1024 scales,
// beyond which every code is at its bound.
template <class V, bool kDivide>
class Coder {
  public:
    explicit Coder(const Grid& grid)
        : scale_(V::all(grid.scale)),
          inverse_(V::all(1.0f / grid.scale)),
          bound_(V::all(1024.0f * grid.scale)),
          least_(V::all(static_cast<float>(grid.low - grid.zero_point))),
          most_(V::all(static_cast<float>(grid.high - grid.zero_point))),
          rounder_(V::all(kRounder)),
          zero_point_(V::all(grid.zero_point)) {}

    // In the low byte of each lane.
    typename V::I operator()(typename V::F x) const {
        typename V::F ratio;
        if constexpr (kDivide) {
            ratio = V::div(x, scale_);
        } else {
            x = V::min(V::max(x, V::sub(V::zero(), bound_)), bound_);  // NaN: the lower bound
            ratio = V::mul(x, inverse_);
            ratio = V::fma(V::fnma(ratio, scale_, x), inverse_, ratio);
            ratio = V::fma(V::fnma(ratio, scale_, x), inverse_, ratio);
        }
        ratio = V::min(V::max(ratio, least_), most_);  // NaN: `least`
        return V::add(V::bits(V::add(ratio, rounder_)), zero_point_);
    }

  private:
    typename V::F scale_, inverse_, bound_, least_, most_, rounder_;
    typename V::I zero_point_;
};

inline bool needs_division(const Grid& grid) { return !(grid.scale >= 0x1p-60f && grid.scale <= 0x1p60f); }

// body(coder) with the coder of the grid.
template <class V, class Body>
inline void with_coder(const Grid& grid, const Body& body) {
    if (needs_division(grid)) {
        body(Coder<V, true>(grid));
    } else {
        body(Coder<V, false>(grid));
    }
}

template <class V>
class Gelu {
  public:
    Gelu() {
        for (int d = 0; d <= kGeluDegree; ++d) table_[d] = V::table(kGeluTable[d]);
    }
    typename V::F operator()(typename V::F x) const {
        const auto rounder = V::all(kRounder);
        const auto a = V::min(V::abs(x), V::all(kGeluMost));  // NaN: kGeluMost
        const auto t = V::mul(a, V::all(kGeluSteps)), shifted = V::add(t, rounder);
        const auto r = V::sub(t, V::sub(shifted, rounder));
        const auto i = V::bits(shifted);
        auto q = V::look_up(table_[kGeluDegree], i);
        for (int d = kGeluDegree - 1; d >= 0; --d) q = V::fma(q, r, V::look_up(table_[d], i));
        return V::fnma(a, q, V::max(V::zero(), x));  // NaN, the second operand, stays
    }

  private:
    typename V::Table table_[kGeluDegree + 1];
};

template <class V>
inline typename V::F exp_of(typename V::F x) {
    const auto least = V::all(kExpLeast), rounder = V::all(kRounder);
    const auto inside = V::max(x, least);  // NaN: kExpLeast
    const auto shifted = V::add(V::mul(inside, V::all(kLog2E)), rounder), n = V::sub(shifted, rounder);
    const auto r = V::fnma(n, V::all(kLn2Low), V::fnma(n, V::all(kLn2High), inside));
    auto p = V::all(kExp[0]);
    for (int d = 1; d < 6; ++d) p = V::fma(p, r, V::all(kExp[d]));
    const auto y = V::add(V::fma(p, V::mul(r, r), r), V::all(1.0f));
    const auto power = V::power_of_two(V::bits(shifted));
    // 0 below the least, and NaN stays
    return V::where(V::not_below(x, least), V::mul(y, power), V::nan_or_zero(x));
}

template <class V>
void quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    with_coder<V>(grid, [&](const auto& coder) {
        by_lanes<V>(n, [&](std::size_t i, auto lanes) { lanes.store(coder(lanes.load(x + i)), codes + i); });
    });
}

template <class V>
void gelu(const float* x, std::size_t n, float* y) {
    const Gelu<V> function;
    by_lanes<V>(n, [&](std::size_t i, auto lanes) { lanes.store(function(lanes.load(x + i)), y + i); });
}

template <class V>
void gelu_quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    const Gelu<V> function;
    with_coder<V>(grid, [&](const auto& coder) {
        by_lanes<V>(n, [&](std::size_t i, auto lanes) {
            lanes.store(coder(function(lanes.load(x + i))), codes + i);
        });
    });
}

template <class V>
void layer_norm(const float* x, const float* residual, std::size_t n, const float* gamma, const float* beta,
                float epsilon, float* y) {
    const auto count = static_cast<float>(n);
    auto sums = V::zero(), squares = V::zero();
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        auto z = lanes.load(x + i);
        if (residual != nullptr) z = V::add(z, lanes.load(residual + i));
        lanes.store(z, y + i);
        sums = V::add(sums, z);
    });
    const auto mean = V::all(V::total(sums) / count);
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto d = lanes.keep(V::sub(lanes.load(y + i), mean));
        squares = V::fma(d, d, squares);
    });
    const auto inverse = V::all(1.0f / sqrtf(V::total(squares) / count + epsilon));
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto normal = V::mul(V::sub(lanes.load(y + i), mean), inverse);
        lanes.store(V::fma(normal, lanes.load(gamma + i), lanes.load(beta + i)), y + i);
    });
}

// softmax of a row whose largest element is known, except for the last factor, which is returned.
template <class V>
inline float exps_of_row(float* x, std::size_t n, float most) {
    const auto top = V::all(most);
    auto sums = V::zero();
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto e = lanes.keep(exp_of<V>(V::sub(lanes.load(x + i), top)));
        lanes.store(e, x + i);
        sums = V::add(sums, e);
    });
    return 1.0f / V::total(sums);
}

template <class V>
void softmax(float* x, std::size_t n) {
    const auto nothing = V::all(-HUGE_VALF);
    auto most = nothing;
    by_lanes<V>(
        n, [&](std::size_t i, auto lanes) { most = V::max(lanes.fill(lanes.load(x + i), nothing), most); });
    const auto factor = V::all(exps_of_row<V>(x, n, V::largest(most)));
    by_lanes<V>(n, [&](std::size_t i, auto lanes) { lanes.store(V::mul(lanes.load(x + i), factor), x + i); });
}

template <class V>
void softmax_quantize(const Scores& scores, const Grid& grid, float* work, std::uint8_t* codes,
                      std::size_t codes_stride) {
    // Each step for all rows: the end of a row, where lanes become one number, then overlaps with the next
    // row.
    const auto nothing = V::all(-HUGE_VALF), factor = V::all(scores.scale);
    float found[kMostScoreRows];
    const std::size_t rows = scores.rows, n = scores.n, stride = scores.stride;
    for (std::size_t row = 0; row < rows; ++row) {
        const auto shift = V::all(scores.shifts[row]);
        auto most = nothing;
        by_lanes<V>(n, [&](std::size_t i, auto lanes) {
            const auto sum = V::add(lanes.load(scores.sums + row * stride + i), shift);
            const auto score = V::mul(V::to_float(V::sub(sum, lanes.load(scores.offsets + i))), factor);
            lanes.store(score, work + row * stride + i);
            most = V::max(lanes.fill(score, nothing), most);
        });
        found[row] = V::largest(most);
    }
    for (std::size_t row = 0; row < rows; ++row) {
        found[row] = exps_of_row<V>(work + row * stride, n, found[row]);
    }
    with_coder<V>(grid, [&](const auto& coder) {
        for (std::size_t row = 0; row < rows; ++row) {
            const auto inverse = V::all(found[row]);
            by_lanes<V>(n, [&](std::size_t i, auto lanes) {
                lanes.store(coder(V::mul(lanes.load(work + row * stride + i), inverse)),
                            codes + row * codes_stride + i);
            });
        }
    });
}

template <class V>
constexpr FloatKernels table(const char* name) {
    return {name, quantize<V>, gelu<V>, gelu_quantize<V>, layer_norm<V>, softmax<V>, softmax_quantize<V>};
}

}  // namespace
}  // namespace mrem::runtime
