// The formulas, once, for a vector type V of sixteen floats (simd_<isa>.h); contracts are in kernels.h.
//
// Note: everything here is in an unnamed namespace, and no std:: function is called. The linker would merge
// an inline function with external linkage with its twin from another file, and portable code would then run
// the one compiled for AVX-512.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace mrem {
namespace {

constexpr std::size_t kLanes = 16;

// Sixteen elements, or the first few of them at the end of a run; nothing beyond is read or written.
template <class V>
struct Whole {
    typename V::F load(const float* from) const { return V::load(from); }
    void store(typename V::F value, float* to) const { V::store(value, to); }
    typename V::F keep(typename V::F value) const { return value; }
};

// The same for an aligned output that goes past the caches.
template <class V>
struct WholePastCache : Whole<V> {
    void store(typename V::F value, float* to) const { V::store_past_cache(value, to); }
};

template <class V>
struct Part {
    std::size_t count;
    typename V::F load(const float* from) const { return V::load_first(from, count); }
    void store(typename V::F value, float* to) const { V::store_first(value, to, count); }
    typename V::F keep(typename V::F value) const { return V::keep_first(value, count); }  // zeros beyond
};

// body(i, lanes) for i = 0, 16, 32, …; the last may be a Part.
template <class V, class Body>
inline void by_lanes(std::size_t n, const Body& body) {
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, Whole<V>{});
    if (i < n) body(i, Part<V>{n - i});
}

// The same, storing past the caches if `past_cache` and the alignment of `out` allow it. The choice is made
// for the entire loop, where it costs nothing, not for each vector.
template <class V, class Body>
inline void by_lanes(std::size_t n, bool past_cache, const float* out, const Body& body) {
    if (!past_cache || reinterpret_cast<std::uintptr_t>(out) % (kLanes * sizeof(float)) != 0) {
        by_lanes<V>(n, body);
        return;
    }
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, WholePastCache<V>{});
    if (i < n) body(i, Part<V>{n - i});
    V::fence();  // these stores are not ordered with others, and another thread may read next
}

// The lanes' sums in one fixed order.
template <class V>
inline double total(typename V::D sums) {
    double lanes[kLanes];
    V::store(sums, lanes);
    for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
        for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// clamp(round(ratio), low, high)
template <class V>
inline typename V::F codes_of(typename V::F ratio, typename V::F low, typename V::F high) {
    return V::clamp(V::round(ratio), low, high);
}

template <class V>
void quantize(const float* x, std::size_t n, float scale, Range range, float factor, bool past_cache,
              float* out) {
    const auto s = V::all(scale), low = V::all(range.low), high = V::all(range.high), f = V::all(factor);
    by_lanes<V>(n, past_cache, out, [&](std::size_t i, auto lanes) {
        lanes.store(V::mul(codes_of<V>(V::div(lanes.load(x + i), s), low, high), f), out + i);
    });
}

template <class V>
double quantize_backward(const float* grad, const float* x, std::size_t n, float scale, Range range,
                         bool past_cache, float* grad_x) {
    const auto s = V::all(scale), low = V::all(range.low), high = V::all(range.high);
    const auto half = V::all(0.5f), zero = V::all(0.0f);
    auto sums = V::zeros();
    by_lanes<V>(n, past_cache, grad_x, [&](std::size_t i, auto lanes) {
        const auto g = lanes.load(grad + i);
        const auto ratio = V::div(lanes.load(x + i), s);
        const auto codes = codes_of<V>(ratio, low, high);
        const auto moved = V::sub(codes, ratio);
        const auto saturated = V::greater(V::abs(moved), half);  // false for NaN
        const auto by_step = V::mul(V::where(saturated, codes, moved), g);
        lanes.store(V::where(saturated, zero, g), grad_x + i);
        sums = V::add(sums, V::widen(lanes.keep(by_step)));
    });
    return total<V>(sums);
}

template <class V>
void quantize_by_threshold(const float* w, std::size_t n, float threshold, Levels levels, float factor,
                           float* out) {
    const auto delta = V::all(threshold), f = V::all(factor), zero = V::all(0.0f), minus = V::all(-1.0f);
    const auto inner = V::all(levels.inner), outer = V::all(levels.outer);
    const bool keeps_nan = levels.inner != 0.0f;
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto value = lanes.load(w + i), magnitude = V::abs(value);
        const auto level = V::where(V::greater(magnitude, delta), outer, inner);
        auto codes = V::where(V::greater(zero, value), V::mul(level, minus), level);
        if (keeps_nan) codes = V::where(V::greater(magnitude, minus), codes, value);  // false for NaN only
        lanes.store(V::mul(codes, f), out + i);
    });
}

template <class V>
void scale_product(float* product, std::size_t n, const float* scales, bool one_scale, const float* bias) {
    const auto one = V::all(one_scale ? scales[0] : 0.0f);
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        auto value = V::mul(lanes.load(product + i), one_scale ? one : lanes.load(scales + i));
        if (bias != nullptr) value = V::add(value, lanes.load(bias + i));
        lanes.store(value, product + i);
    });
}

template <class V>
double sum_magnitudes(const float* w, std::size_t n) {
    auto sums = V::zeros();
    by_lanes<V>(n,
                [&](std::size_t i, auto lanes) { sums = V::add(sums, V::widen(V::abs(lanes.load(w + i)))); });
    return total<V>(sums);
}

template <class V>
KeptSum sum_above(const float* w, std::size_t n, float threshold) {
    const auto delta = V::all(threshold), zero = V::all(0.0f), one = V::all(1.0f);
    auto sums = V::zeros(), counts = V::zeros();
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto magnitude = V::abs(lanes.load(w + i));
        const auto kept = V::greater(magnitude, delta);
        sums = V::add(sums, V::widen(lanes.keep(V::where(kept, magnitude, zero))));
        counts = V::add(counts, V::widen(lanes.keep(V::where(kept, one, zero))));
    });
    return {total<V>(sums), total<V>(counts)};
}

template <class V>
LaqSums laq_sums(const float* w, const float* diagonal, std::size_t n, float alpha, Range range) {
    const auto a = V::all(alpha), low = V::all(range.low), high = V::all(range.high);
    auto numerators = V::zeros(), denominators = V::zeros();
    by_lanes<V>(n, [&](std::size_t i, auto lanes) {
        const auto value = lanes.load(w + i);
        const auto codes = V::widen(lanes.keep(codes_of<V>(V::div(value, a), low, high)));
        auto weighted = V::widen(value);
        auto squares = V::mul(codes, codes);
        if (diagonal != nullptr) {
            const auto d = V::widen(lanes.load(diagonal + i));
            weighted = V::mul(weighted, d);
            squares = V::mul(squares, d);
        }
        numerators = V::add(numerators, V::mul(weighted, codes));
        denominators = V::add(denominators, squares);
    });
    return {total<V>(numerators), total<V>(denominators)};
}

template <class V>
constexpr Kernels table(const char* name) {
    return {name,
            quantize<V>,
            quantize_backward<V>,
            quantize_by_threshold<V>,
            scale_product<V>,
            sum_magnitudes<V>,
            sum_above<V>,
            laq_sums<V>};
}

}  // namespace
}  // namespace mrem
