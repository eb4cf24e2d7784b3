// What the C++ tests of the runtime share: random matrices in exact heap blocks, and a pool of real threads.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "gemm.h"
#include "targets.h"

namespace mrem::runtime::testing {

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::exit(1);
}

inline bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// Every target that this machine can run, and AMX emulated where it can run the rest of that.
inline std::vector<const Target*> runnable_targets() {
    std::vector<const Target*> all;
    for (const Target& target : targets()) {
        if (target.supported()) {
            all.push_back(&target);
        } else {
            std::printf("%s: this machine cannot run it\n", target.name());
        }
    }
#ifdef MREM_RUNTIME_HAVE_AMX
    static const Target emulated{&kEmulatedAmxGemm, all[0]->floats, nullptr, "AVX-512"};
    if (cpu_features().avx512_vnni()) all.push_back(&emulated);
#endif
    return all;
}

struct Random {
    std::mt19937 engine{0};
    std::size_t below(std::size_t n) { return engine() % n; }
    float uniform(float low, float high) {
        return low + (high - low) * static_cast<float>(engine()) / 4294967296.0f;
    }
    std::vector<float> floats(std::size_t n, float low, float high) {
        std::vector<float> all(n);
        for (float& x : all) x = uniform(low, high);
        return all;
    }
};

// Codes of weights in the layout; the vector has exactly the size that the contract names.
struct Matrix {
    std::size_t in, out;
    Coding coding;
    std::vector<std::uint8_t> codes;
    std::vector<float> scale, bias;

    Matrix(std::size_t inputs, std::size_t outputs, Coding how, Random& random)
        : in(inputs),
          out(outputs),
          coding(how),
          codes(packed_bytes(in, out, coding.bits)),
          scale(random.floats(out, 0.001f, 0.02f)),
          bias(random.floats(out, -1.0f, 1.0f)) {
        // 3 is no code of ternary weights, but a file may hold it.
        for (std::size_t k = 0; k < in; ++k) {
            for (std::size_t n = 0; n < out; ++n)
                set(k, n, static_cast<int>(random.below(1u << coding.bits)));
        }
    }
    void set(std::size_t k, std::size_t n, int code) {
        const Place place = place_of(k, n, in, coding.bits);
        const int mask = ((1 << coding.bits) - 1) << place.shift;
        std::uint8_t& byte = codes[place.byte];
        byte = static_cast<std::uint8_t>((byte & ~mask) | code << place.shift);
    }
    void fill(int code) {
        for (std::size_t k = 0; k < in; ++k) {
            for (std::size_t n = 0; n < out; ++n) set(k, n, code);
        }
    }
    int value(std::size_t k, std::size_t n) const {
        const Place place = place_of(k, n, in, coding.bits);
        return (codes[place.byte] >> place.shift & ((1 << coding.bits) - 1)) * coding.spacing + coding.low;
    }
    Weight weight() const {
        return {codes.data(), scale.data(), bias.data(), in, out, coding.bits, coding.spacing, coding.low};
    }
};

class Codes {
  public:
    Codes(std::size_t rows, std::size_t width) : rows_(rows), width_(width), all_(rows * stride_of(width)) {}
    std::uint8_t& at(std::size_t row, std::size_t k) { return all_[row * stride_of(width_) + k]; }
    int at(std::size_t row, std::size_t k) const { return all_[row * stride_of(width_) + k]; }
    CodeRows rows() const {
        return {const_cast<std::uint8_t*>(all_.data()), rows_, width_, stride_of(width_)};
    }

  private:
    std::size_t rows_, width_;
    std::vector<std::uint8_t> all_;
};

inline void check(bool holds, const char* what, const Target& target, const Matrix& w, std::size_t rows) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (%s, %zu rows, %zu × %zu, %d bits, spacing %d, low %d)\n", what,
                 target.name(), rows, w.in, w.out, w.coding.bits, w.coding.spacing, w.coding.low);
    std::exit(1);
}

// New threads for every call: slow, but as parallel as can be.
class ThreadPool final : public Pool {
  public:
    explicit ThreadPool(std::size_t threads) : threads_(threads) {}
    std::size_t threads() const override { return threads_; }
    void run(std::size_t tasks, void (*body)(std::size_t, void*), void* context) override {
        std::atomic<std::size_t> next{0};
        std::vector<std::thread> all;
        for (std::size_t i = 0; i < threads_; ++i) {
            all.emplace_back([&] {
                for (std::size_t task; (task = next.fetch_add(1)) < tasks;) body(task, context);
            });
        }
        for (std::thread& thread : all) thread.join();
    }

  private:
    std::size_t threads_;
};

}  // namespace mrem::runtime::testing
