// Measures the integer products of every target that this machine can run: billions of multiplications per
// second, and what part that is of what is attainable, measured right before: the target's own
// multiplications and additions on registers, and for sums of 16 bits their widening after as many steps as
// these weights allow on average (proof.h). Every product is compared with the plain one before it is timed.
//
//     bench_gemm [target] [bits] [rows]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "gemm.h"
#include "register_limits.h"
#include "test_tools.h"

using namespace mrem::runtime;
using namespace mrem::runtime::testing;

namespace {

class FirstSums final : public Sink {
  public:
    void take(const Sums& sums) override { total += sums.sums[0]; }
    std::int64_t total = 0;
};

// The best of several runs of about `seconds` each, in seconds per call.
template <class Body>
double fastest(double seconds, const Body& body) {
    using Clock = std::chrono::steady_clock;
    const auto once = [&](int calls) {
        const auto start = Clock::now();
        for (int i = 0; i < calls; ++i) body();
        return std::chrono::duration<double>(Clock::now() - start).count() / calls;
    };
    const int calls = std::max(1, static_cast<int>(seconds / once(1)));
    double best = once(calls);
    for (int i = 0; i < 4; ++i) best = std::min(best, once(calls));
    return best;
}

// Quads per run of 16-bit sums, on average; 0 where there are none.
int mean_run(const Target& target, const Weights& weights) {
    const Blocks blocks = blocks_of(*target.gemm, weights.inputs(), weights.coding().bits);
    const std::size_t all = steps(weights.inputs(), weights.coding().bits) * fields(weights.coding().bits);
    std::size_t quads = 0, runs = 0;
    for (std::size_t panel = 0; panel < weights.panel_count(); ++panel) {
        for (std::size_t block = 0; block < blocks.count; ++block) {
            const std::uint8_t* run = weights.cuts(panel, block, blocks.count);
            if (run == nullptr) return 0;
            const std::size_t end = std::min(all, (block + 1) * blocks.quads) - block * blocks.quads;
            for (std::size_t at = 0; at < end; at += *run++) ++runs;
            quads += end;
        }
    }
    return static_cast<int>((quads + runs / 2) / runs);
}

void verify(const Target& target, const Matrix& w, const Codes& x, std::size_t rows) {
    const Weights weights(target, w.weight(), Grid{0.25f, 128, 0, 255});
    std::vector<float> y(rows * w.out);
    FloatSink sink(y.data(), w.out, false);
    multiply(target, weights, x.rows(), 0, weights.panel_count(), sink);
    for (std::size_t row = 0; row < rows; row += 1 + rows / 5) {
        for (std::size_t c = 0; c < w.out; c += 1 + c % 7) {
            std::int64_t sum = 0;
            for (std::size_t k = 0; k < w.in; ++k) sum += (x.at(row, k) - 128) * w.value(k, c);
            const float product = static_cast<float>(static_cast<std::int32_t>(sum)) * (0.25f * w.scale[c]);
            check(same_bits(y[row * w.out + c], product + w.bias[c]), "a product before it is timed");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string only = argc > 1 ? argv[1] : "";
    const int only_bits = argc > 2 ? std::atoi(argv[2]) : 0;
    const std::size_t only_rows = argc > 3 ? static_cast<std::size_t>(std::atoi(argv[3])) : 0;
    const std::pair<std::size_t, std::size_t> shapes[] = {{384, 1152}, {384, 384}, {384, 1536}, {1536, 384},
                                                          {768, 2304}, {768, 768}, {768, 3072}, {3072, 768}};
    Random random;
    for (const Target& target : targets()) {
        if (!target.supported() || (!only.empty() && only != target.name())) continue;
        for (const Coding& coding : {Coding{2, 1, -1}, Coding{4, 1, -8}, Coding{8, 1, -128}}) {
            if (only_bits != 0 && only_bits != coding.bits) continue;
            std::printf("%s, %d bits: GMAC/s (of multiplications and additions on registers alone%s)\n",
                        target.name(), coding.bits, target.gemm->cuts ? ", widening included" : "");
            for (const auto& [in, out] : shapes) {
                Matrix w(in, out, coding, random);
                if (coding.bits < 8) {  // codes of real grids: -1 to 1, -7 to 7
                    const int least = coding.bits == 2 ? 0 : 1, count = coding.bits == 2 ? 3 : 15;
                    for (std::size_t k = 0; k < in; ++k) {
                        for (std::size_t n = 0; n < out; ++n) {
                            w.set(k, n,
                                  least + static_cast<int>(random.below(static_cast<std::size_t>(count))));
                        }
                    }
                }
                const Weights weights(target, w.weight(), Grid{0.25f, 128, 0, 255});
                const int run = mean_run(target, weights);
                const RegisterLoop loop = register_loop(target.name(), run);
                const double limit =
                    loop.run == nullptr ? 0.0 : loop.products / fastest(0.02, [&] { loop.run(); }) * 1e-9;
                std::printf("  %4zu x %4zu: registers %6.1f", in, out, limit);
                if (run > 0) std::printf(" (runs of %d)", run);
                for (const std::size_t rows : {1, 8, 32, 128, 1024}) {
                    if (only_rows != 0 && rows != only_rows) continue;
                    Codes x(rows, in);
                    for (std::size_t row = 0; row < rows; ++row) {
                        for (std::size_t k = 0; k < in; ++k) {
                            x.at(row, k) = static_cast<std::uint8_t>(random.below(256));
                        }
                    }
                    verify(target, w, x, rows);
                    FirstSums sink;
                    const double seconds = fastest(0.02, [&] {
                        for (std::size_t first = 0; first < rows; first += 128) {
                            CodeRows part = x.rows();
                            part.codes += first * part.stride;
                            part.rows = std::min<std::size_t>(128, rows - first);
                            multiply(target, weights, part, 0, weights.panel_count(), sink);
                        }
                    });
                    const double speed = static_cast<double>(rows * in * out) / seconds * 1e-9;
                    std::printf("  %4zu rows %6.1f", rows, speed);
                    if (limit > 0.0) std::printf(" (%2.0f%%)", 100.0 * speed / limit);
                }
                std::printf("\n");
            }
        }
    }
    return 0;
}
