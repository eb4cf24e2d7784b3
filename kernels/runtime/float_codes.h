// Activations to codes on sixteen lanes: of floats and of sums, directly or after GELU.
//
// Note: everything here is in an unnamed namespace, and no inline function of the standard library with
// external linkage is called: the linker would merge it with its twin from portable code.
#pragma once

#include <math.h>

#include "float_lanes.h"

namespace mrem::runtime {
namespace {

// Codes of a grid.
//
// Note: x / scale is computed without a division, and is still the correctly rounded quotient. 1 / scale is
// known as the sum of two floats, so that x · (1 / scale) by one product and one fma is within one unit in
// the last place of the quotient. From there q + (x − q · scale) · (1 / scale) with fma is the correctly
// rounded quotient (Markstein's theorem). It needs a scale far from the ends of the range, so that no
// remainder that matters is denormal, and quotients that do not overflow: x is clamped to what the outer
// codes stand for.
template <class V, bool kDivide>
class Coder {
  public:
    explicit Coder(const Grid& grid)
        : scale_(V::all(grid.scale)),
          inverse_(V::all(1.0f / grid.scale)),
          rest_(V::all(rest_of(grid.scale, 1.0f / grid.scale))),
          least_(V::all(least_of(grid) * (kDivide ? 1.0f : grid.scale))),
          most_(V::all(most_of(grid) * (kDivide ? 1.0f : grid.scale))),
          rounder_(V::all(kRounder)),
          zero_point_(V::all(grid.zero_point)) {}

    // In the low byte of each lane. NaN becomes the lowest code.
    template <int N>
    Codes<V, N> operator()(Group<V, N> x) const {
        if constexpr (kDivide) x.each([&](auto y) { return V::div(y, scale_); });
        x.each([&](auto y) { return V::max(y, least_); });
        x.each([&](auto y) { return V::min(y, most_); });
        if constexpr (!kDivide) {
            Group<V, N> q = x;
            q.each([&](auto y) { return V::mul(y, rest_); });
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) q.of[k] = V::fma(x.of[k], inverse_, q.of[k]);
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) x.of[k] = V::fnma(q.of[k], scale_, x.of[k]);
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) x.of[k] = V::fma(x.of[k], inverse_, q.of[k]);
        }
        return rounded(x);
    }

    // Of ratios to the scale.
    template <int N>
    Codes<V, N> of_ratios(Group<V, N> x) const {
        static_assert(kDivide, "bounds of ratios");
        x.each([&](auto y) { return V::max(y, least_); });
        x.each([&](auto y) { return V::min(y, most_); });
        return rounded(x);
    }

  private:
    // 1 / scale − inverse
    static float rest_of(float scale, float inverse) { return fmaf(-inverse, scale, 1.0f) * inverse; }
    static float least_of(const Grid& grid) { return static_cast<float>(grid.low - grid.zero_point); }
    static float most_of(const Grid& grid) { return static_cast<float>(grid.high - grid.zero_point); }

    template <int N>
    Codes<V, N> rounded(Group<V, N> ratio) const {
        Codes<V, N> codes;
        ratio.each([&](auto y) { return V::add(y, rounder_); });
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) codes.of[k] = V::add(V::bits(ratio.of[k]), zero_point_);
        return codes;
    }

    typename V::F scale_, inverse_, rest_, least_, most_, rounder_;
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
    template <int N>
    Group<V, N> operator()(const Group<V, N>& x) const {
        const auto rounder = V::all(kRounder), steps = V::all(kGeluSteps);
        Group<V, N> a = x, r, q;
        Codes<V, N> i;
        a.each([&](auto y) { return V::magnitude(y, V::all(kGeluMost)); });  // NaN: kGeluMost
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            const auto shifted = V::fma(a.of[k], steps, rounder);
            i.of[k] = V::bits(shifted);
            r.of[k] = V::fma(a.of[k], steps, V::sub(rounder, shifted));
        }
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) q.of[k] = V::look_up(table_[kGeluDegree], i.of[k]);
        MREM_UNROLLED
        for (int d = kGeluDegree - 1; d >= 0; --d) {
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                q.of[k] = V::fma(q.of[k], r.of[k], V::look_up(table_[d], i.of[k]));
            }
        }
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {  // NaN, the second operand, stays
            q.of[k] = V::fnma(a.of[k], q.of[k], V::max(V::zero(), x.of[k]));
        }
        return q;
    }

  private:
    typename V::Table table_[kGeluDegree + 1];
};

// Codes of GELU: no division.
template <class V>
class GeluCoder {
  public:
    explicit GeluCoder(const Grid& grid) : inverse_(V::all(1.0f / grid.scale)), coder_(grid) {}
    template <int N>
    Codes<V, N> operator()(const Group<V, N>& x) const {
        Group<V, N> y = gelu_(x);
        y.each([&](auto z) { return V::mul(z, inverse_); });
        return coder_.of_ratios(y);
    }

  private:
    typename V::F inverse_;
    Gelu<V> gelu_;
    Coder<V, true> coder_;
};

// x to codes.
template <class V, class Coding>
inline void to_codes(const float* x, std::size_t n, const Coding& coding, std::uint8_t* codes) {
    const auto some = [&](std::size_t i, auto lanes, auto count) {
        constexpr int N = decltype(count)::value;
        Group<V, N> values;
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            values.of[k] = lanes.load(x + i + static_cast<std::size_t>(k) * kFloatLanes);
        }
        const Codes<V, N> found = coding(values);
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            lanes.store(found.of[k], codes + i + static_cast<std::size_t>(k) * kFloatLanes);
        }
    };
    const std::size_t whole = n / kFloatLanes, left = n % kFloatLanes;
    by_groups<V>(whole, [&](std::size_t i, auto count) { some(i * kFloatLanes, Whole<V>{}, count); });
    if (left > 0) some(whole * kFloatLanes, Part<V>{left}, Count<1>{});
}

template <class V>
void quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    with_coder<V>(grid, [&](const auto& coder) { to_codes<V>(x, n, coder, codes); });
}

template <class V>
void gelu(const float* x, std::size_t n, float* y) {
    const Gelu<V> function;
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        lanes.store(function(Group<V, 1>{{lanes.load(x + i)}}).of[0], y + i);
    });
}

template <class V>
void gelu_quantize(const float* x, std::size_t n, const Grid& grid, std::uint8_t* codes) {
    to_codes<V>(x, n, GeluCoder<V>(grid), codes);
}

// Panel by panel, some rows at once.
template <class V, class Coding>
inline void sums_to_codes(const SumRows& sums, const Coding& coding, std::uint8_t* codes,
                          std::size_t codes_stride) {
    by_lanes<V>(sums.columns, [&](std::size_t column, auto lanes) {
        const Columns& by = sums.by[column / kPanel];
        const auto offset = V::load(by.offset);
        const auto scale = V::load(by.scale), bias = V::load(by.bias);
        by_groups<V>(sums.rows, [&](std::size_t row, auto count) {
            constexpr int N = decltype(count)::value;
            Group<V, N> y;
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                const std::size_t at = row + static_cast<std::size_t>(k);
                auto sum = V::load(sums.sums + at * sums.stride + column);
                if (sums.shifts != nullptr) sum = V::add(sum, V::all(sums.shifts[at]));
                y.of[k] = V::mul(V::to_float(V::sub(sum, offset)), scale);
            }
            y.each([&](auto x) { return V::add(x, bias); });
            const Codes<V, N> found = coding(y);
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                const std::size_t at = row + static_cast<std::size_t>(k);
                lanes.store(found.of[k], codes + at * codes_stride + column);
            }
        });
    });
}

template <class V>
void quantize_sums(const SumRows& sums, const Grid& grid, bool gelu, std::uint8_t* codes,
                   std::size_t codes_stride) {
    if (gelu) return sums_to_codes<V>(sums, GeluCoder<V>(grid), codes, codes_stride);
    with_coder<V>(grid, [&](const auto& coder) { sums_to_codes<V>(sums, coder, codes, codes_stride); });
}

}  // namespace
}  // namespace mrem::runtime
