// The formulas of float_scalar.cpp on sixteen lanes. A file of an instruction set includes this with its
// lanes V and compiles it for itself.
//
// Note: everything here is in an unnamed namespace, and no inline function of the standard library with
// external linkage is called: the linker would merge it with its twin from portable code.
#pragma once

#include <math.h>

#include "float_codes.h"

namespace mrem::runtime {
namespace {

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

// 2^(d · factor)
template <class V, int N>
inline Group<V, N> power_of(const Group<V, N>& d, typename V::F factor) {
    const auto rounder = V::all(kRounder);
    Group<V, N> shifted, r, p;
    MREM_UNROLLED
    for (int k = 0; k < N; ++k) {
        shifted.of[k] = V::fma(d.of[k], factor, rounder);
        r.of[k] = V::fma(d.of[k], factor, V::sub(rounder, shifted.of[k]));
        p.of[k] = V::all(kPower[0]);
    }
    MREM_UNROLLED
    for (int i = 1; i < 6; ++i) {
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) p.of[k] = V::fma(p.of[k], r.of[k], V::all(kPower[i]));
    }
    MREM_UNROLLED
    for (int k = 0; k < N; ++k) p.of[k] = V::times_power(p.of[k], V::bits(shifted.of[k]));
    return p;
}

template <class V, int kBits>
inline void expand_bits(const PackedRow& row, const float* added, std::size_t n, float* y) {
    const auto spacing = V::all(static_cast<float>(row.spacing)), low = V::all(static_cast<float>(row.low));
    const auto scale = V::all(row.scale);
    const auto some = [&](std::size_t i, auto lanes, const std::uint8_t* bytes) {
        const auto value = V::fma(V::to_float(V::template codes<kBits>(bytes)), spacing, low);  // exact
        auto x = V::mul(value, scale);
        if (added != nullptr) x = V::add(x, lanes.load(added + i));
        lanes.store(x, y + i);
    };
    constexpr std::size_t kBytes = kFloatLanes * kBits / 8;
    const std::size_t whole = n / kFloatLanes * kFloatLanes, left = n - whole;
    for (std::size_t i = 0; i < whole; i += kFloatLanes) {
        some(i, Whole<V>{}, row.bytes + i / kFloatLanes * kBytes);
    }
    if (left > 0) {
        std::uint8_t bytes[kBytes] = {};
        std::memcpy(bytes, row.bytes + whole / kFloatLanes * kBytes, (left * kBits + 7) / 8);
        some(whole, Part<V>{left}, bytes);
    }
}

template <class V>
void expand(const PackedRow& row, const float* added, std::size_t n, float* y) {
    if (row.bits == 2) return expand_bits<V, 2>(row, added, n, y);
    if (row.bits == 4) return expand_bits<V, 4>(row, added, n, y);
    expand_bits<V, 8>(row, added, n, y);
}

template <class V>
void layer_norm(std::size_t rows, const float* const* x, const float* const* residual, std::size_t n,
                const float* gamma, const float* beta, float epsilon, float* const* y) {
    const auto count = static_cast<float>(n);
    by_groups<V>(rows, [&](std::size_t first, auto group) {
        constexpr int N = decltype(group)::value;
        Group<V, N> sums, squares, mean, inverse;
        const float *from[N], *added[N];
        float* to[N];
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            const std::size_t row = first + static_cast<std::size_t>(k);
            from[k] = x[row], to[k] = y[row];
            added[k] = residual != nullptr ? residual[row] : nullptr;
            sums.of[k] = squares.of[k] = V::zero();
        }
        by_lanes<V>(n, [&](std::size_t i, auto lanes) {
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                auto z = lanes.load(from[k] + i);
                if (residual != nullptr) z = V::add(z, lanes.load(added[k] + i));
                lanes.store(z, to[k] + i);
                sums.of[k] = V::add(sums.of[k], z);
            }
        });
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) mean.of[k] = V::all(V::total(sums.of[k]) / count);
        by_lanes<V>(n, [&](std::size_t i, auto lanes) {
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                const auto d = lanes.keep(V::sub(lanes.load(to[k] + i), mean.of[k]));
                squares.of[k] = V::fma(d, d, squares.of[k]);
            }
        });
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            inverse.of[k] = V::all(1.0f / sqrtf(V::total(squares.of[k]) / count + epsilon));
        }
        by_lanes<V>(n, [&](std::size_t i, auto lanes) {
            const auto slope = lanes.load(gamma + i), shift = lanes.load(beta + i);
            MREM_UNROLLED
            for (int k = 0; k < N; ++k) {
                const auto normal = V::mul(V::sub(lanes.load(to[k] + i), mean.of[k]), inverse.of[k]);
                lanes.store(V::fma(normal, slope, shift), to[k] + i);
            }
        });
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

// N rows at once: nothing in one waits for another.
template <class V, int N>
inline void softmax_rows(const Scores& scores, std::size_t first, const Coder<V, true>& coder, float scale,
                         float* work, std::uint8_t* codes, std::size_t codes_stride) {
    const std::size_t n = scores.n, stride = scores.stride;
    const std::int32_t* sums = scores.sums + first * stride;
    const auto nothing = V::all(INT32_MIN), least = V::all(-power_reach(power_factor(scores.scale)));
    const auto factor = V::all(power_factor(scores.scale));
    typename V::I most[N];
    Group<V, N> totals;
    MREM_UNROLLED
    for (int k = 0; k < N; ++k) most[k] = nothing;
    const auto score = [&](std::size_t i, auto lanes, auto offset, int k) {
        return V::sub(lanes.load(sums + static_cast<std::size_t>(k) * stride + i), offset);
    };
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto offset = lanes.load(scores.offsets + i);
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            most[k] = V::max(most[k], lanes.fill(score(i, lanes, offset, k), nothing));
        }
    });
    MREM_UNROLLED
    for (int k = 0; k < N; ++k) {
        most[k] = V::all(V::largest(most[k]));
        totals.of[k] = V::zero();
    }
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto offset = lanes.load(scores.offsets + i);
        Group<V, N> x;
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            x.of[k] = V::to_float(V::max(V::sub(score(i, lanes, offset, k), most[k]), least));
        }
        x = power_of<V, N>(x, factor);
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            x.of[k] = lanes.keep(x.of[k]);
            lanes.store(x.of[k], work + static_cast<std::size_t>(k) * stride + i);
            totals.of[k] = V::add(totals.of[k], x.of[k]);
        }
    });
    MREM_UNROLLED
    for (int k = 0; k < N; ++k) totals.of[k] = V::all(1.0f / (V::total(totals.of[k]) * scale));
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        Group<V, N> x;
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            x.of[k] = V::mul(lanes.load(work + static_cast<std::size_t>(k) * stride + i), totals.of[k]);
        }
        const Codes<V, N> found = coder.of_ratios(x);
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) {
            lanes.store(found.of[k], codes + (first + static_cast<std::size_t>(k)) * codes_stride + i);
        }
    });
}

template <class V>
void softmax_quantize(const Scores& scores, const Grid& grid, float* work, std::uint8_t* codes,
                      std::size_t codes_stride) {
    const Coder<V, true> coder(grid);
    by_groups<V>(scores.rows, [&](std::size_t row, auto count) {
        softmax_rows<V, decltype(count)::value>(scores, row, coder, grid.scale, work, codes, codes_stride);
    });
}

template <class V>
constexpr FloatKernels table(const char* name) {
    return {name,
            expand<V>,
            quantize<V>,
            gelu<V>,
            gelu_quantize<V>,
            layer_norm<V>,
            quantize_sums<V>,
            softmax<V>,
            softmax_quantize<V>};
}

}  // namespace
}  // namespace mrem::runtime
