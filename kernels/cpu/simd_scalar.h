// Sixteen floats in portable C++: the truth for the instruction sets, and the fallback where none of them
// runs. The loops have a fixed length, so that compilers use the vectors of the baseline.
#pragma once

#include <math.h>  // nearbyintf itself: <cmath> would add an inline wrapper, see kernels_impl.h

#include <cstddef>

namespace mrem {
namespace {

struct Scalar {
    static constexpr std::size_t N = 16;
    struct F {
        float v[N];
    };
    struct D {
        double v[N];
    };
    struct M {
        bool v[N];
    };

    template <class Result, class Of>
    static Result each(const Of& of) {
        Result result;
        for (std::size_t i = 0; i < N; ++i) result.v[i] = of(i);
        return result;
    }

    static F all(float value) {
        return each<F>([&](std::size_t) { return value; });
    }
    static F load(const float* from) {
        return each<F>([&](std::size_t i) { return from[i]; });
    }
    static F load_first(const float* from, std::size_t n) {
        return each<F>([&](std::size_t i) { return i < n ? from[i] : 0.0f; });
    }
    static void store(const F& a, float* to) { store_first(a, to, N); }
    static void store_first(const F& a, float* to, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) to[i] = a.v[i];
    }
    static void store_past_cache(const F& a, float* to) { store(a, to); }  // C++ cannot express it
    static void fence() {}
    static F keep_first(const F& a, std::size_t n) {
        return each<F>([&](std::size_t i) { return i < n ? a.v[i] : 0.0f; });
    }

    static F add(const F& a, const F& b) {
        return each<F>([&](std::size_t i) { return a.v[i] + b.v[i]; });
    }
    static F sub(const F& a, const F& b) {
        return each<F>([&](std::size_t i) { return a.v[i] - b.v[i]; });
    }
    static F mul(const F& a, const F& b) {
        return each<F>([&](std::size_t i) { return a.v[i] * b.v[i]; });
    }
    static F div(const F& a, const F& b) {
        return each<F>([&](std::size_t i) { return a.v[i] / b.v[i]; });
    }
    static F abs(const F& a) {
        return each<F>([&](std::size_t i) { return fabsf(a.v[i]); });
    }
    static F round(const F& a) {  // half to even: the rounding mode that C++ starts with
        return each<F>([&](std::size_t i) { return nearbyintf(a.v[i]); });
    }
    static F clamp(const F& a, const F& low, const F& high) {  // NaN fails both comparisons and stays
        return each<F>([&](std::size_t i) {
            const float raised = a.v[i] < low.v[i] ? low.v[i] : a.v[i];
            return raised > high.v[i] ? high.v[i] : raised;
        });
    }
    static M greater(const F& a, const F& b) {
        return each<M>([&](std::size_t i) { return a.v[i] > b.v[i]; });
    }
    static F where(const M& m, const F& yes, const F& no) {
        return each<F>([&](std::size_t i) { return m.v[i] ? yes.v[i] : no.v[i]; });
    }

    static D zeros() {
        return each<D>([](std::size_t) { return 0.0; });
    }
    static D widen(const F& a) {
        return each<D>([&](std::size_t i) { return static_cast<double>(a.v[i]); });
    }
    static D add(const D& a, const D& b) {
        return each<D>([&](std::size_t i) { return a.v[i] + b.v[i]; });
    }
    static D mul(const D& a, const D& b) {
        return each<D>([&](std::size_t i) { return a.v[i] * b.v[i]; });
    }
    static void store(const D& a, double* to) {
        for (std::size_t i = 0; i < N; ++i) to[i] = a.v[i];
    }
};

}  // namespace
}  // namespace mrem
