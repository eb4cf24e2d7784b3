// Sixteen lanes at a time, and several such groups at once, for the float kernels of an instruction set.
//
// Note: everything here is in an unnamed namespace, and no inline function of the standard library with
// external linkage is called: the linker would merge it with its twin from portable code.
#pragma once

#include <cstring>

#include "float_kernels.h"
#include "unroll.h"

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
    template <class T>
    T fill(T value, T) const {
        return value;
    }
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
    template <class T>
    T fill(T value, T beyond) const {
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

// Steps on N groups of lanes that do not depend on each other: a processor can begin one while it waits for
// another. V::kAtOnce of them fit into its registers.
template <class V, int N>
struct Group {
    typename V::F of[N];

    template <class Step>
    void each(const Step& step) {
        MREM_UNROLLED
        for (int k = 0; k < N; ++k) of[k] = step(of[k]);
    }
};
template <class V, int N>
struct Codes {
    typename V::I of[N];
};

// body(Count) with as many at once as possible, then with fewer for the rest: body(first, Count<N>).
template <int N>
struct Count {
    static constexpr int value = N;
};
template <class V, int N = V::kAtOnce, class Body>
inline void by_groups(std::size_t n, const Body& body, std::size_t first = 0) {
    for (; first + N <= n; first += N) body(first, Count<N>{});
    if constexpr (N > 1) by_groups<V, N / 2>(n, body, first);
}

}  // namespace
}  // namespace mrem::runtime
