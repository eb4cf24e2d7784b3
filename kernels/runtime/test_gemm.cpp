// Tests of the integer products without onnxruntime, on every target that this machine can run. Truth is a
// plain product over single codes, read by the formula of layout.h.
#include <cstdio>
#include <cstring>

#include "gemm.h"
#include "test_tools.h"

using namespace mrem::runtime;
using namespace mrem::runtime::testing;

namespace {

// The sums that a product gives, before floats.
class Collect final : public Sink {
  public:
    Collect(std::size_t rows, std::size_t columns) : stride_(columns), sums(rows * columns, 12345) {}
    void take(const Sums& tile) override {
        for (std::size_t row = 0; row < tile.rows; ++row) {
            for (std::size_t c = 0; c < tile.columns(); ++c) {
                sums[(tile.row + row) * stride_ + tile.column() + c] = tile.sums[row * tile.stride + c];
            }
        }
    }

  private:
    std::size_t stride_;

  public:
    std::vector<std::int32_t> sums;
};

enum class Values { kRandom, kHigh, kAlternating, kStored };

// Activations that drive sums to their extremes: all 255, or 255 exactly where a weight has one sign.
Codes activations(const Matrix& w, std::size_t rows, Values values, Random& random) {
    Codes x(rows, w.in);
    for (std::size_t row = 0; row < rows; ++row) {
        const std::size_t column = random.below(w.out);
        const int sign = row % 2 == 0 ? 1 : -1;
        for (std::size_t k = 0; k < w.in; ++k) {
            int code = static_cast<int>(random.below(256));
            if (values == Values::kHigh) code = 255;
            if (values == Values::kAlternating) code = w.value(k, column) * sign > 0 ? 255 : 0;
            x.at(row, k) = static_cast<std::uint8_t>(code);
        }
    }
    return x;
}

void check_product(const Target& target, const Matrix& w, std::size_t rows, Values values, Random& random) {
    const Codes x = activations(w, rows, values, random);
    const Grid grid{0.25f, 128, 0, 255};
    const Weights weights(target, w.weight(), grid);
    Collect sums(rows, w.out);
    OneThread alone;
    multiply(target, weights, x.rows(), alone, sums);
    std::vector<float> y(rows * w.out + 1, -7.0f);
    FloatSink floats(y.data(), w.out, false);
    ThreadPool several(3);
    multiply(target, weights, x.rows(), several, floats);
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t c = 0; c < w.out; ++c) {
            std::int64_t sum = 0, all = 0;
            for (std::size_t k = 0; k < w.in; ++k) {
                sum += x.at(row, k) * w.value(k, c);
                all += w.value(k, c);
            }
            check(sums.sums[row * w.out + c] == sum, "a sum", target, w, rows);
            const float product =
                static_cast<float>(static_cast<std::int32_t>(sum - 128 * all)) * (grid.scale * w.scale[c]);
            check(same_bits(y[row * w.out + c], product + w.bias[c]), "a float", target, w, rows);
        }
    }
    check(y.back() == -7.0f, "nothing beyond", target, w, rows);
}

void check_layout() {
    Random random;
    const Matrix w(17, 19, {2, 1, -1}, random);
    check(packed_bytes(17, 19, 2) == 2 * 2 * 64, "packed_bytes");
    const Place place = place_of(16, 17, 17, 2);  // second panel, second step, field 0, column 1, input 0
    check(place.byte == (1 * 2 + 1) * 64 + 4 && place.shift == 0, "place_of");
    const Place other = place_of(13, 3, 17, 2);  // field 3, input 1
    check(other.byte == 3 * 4 + 1 && other.shift == 6, "place_of");
}

// Weights and activations for which a run of 16-bit sums that is one quad too long gives a wrong result, on
// the target that has such runs; the proved runs are right.
void check_runs_too_long(const Target& target) {
    Random random;
    Matrix w(1024, 16, {4, 1, -8}, random);
    for (std::size_t k = 0; k < w.in; ++k) w.set(k, 5, 15);  // 7, everywhere: 14 in a lane of a quad
    const Codes x = [&] {
        Codes all(target.gemm->rows, w.in);
        for (std::size_t row = 0; row < target.gemm->rows; ++row) {
            for (std::size_t k = 0; k < w.in; ++k) all.at(row, k) = 255;
        }
        return all;
    }();
    const std::size_t quads = target.gemm->depth;
    Buffer<std::int8_t> b(quads * kStepBytes);
    target.gemm->unpack(w.codes.data(), quads / 2, {4, 1, -8}, b.data());
    std::vector<std::uint8_t> runs;
    check(append_runs(b.data(), quads, &runs), "16 bits are enough for 4-bit weights");
    check(runs.front() == 8, "nine quads of 14 · 255 fit into 16 bits: two groups of four");
    const auto right = [&](const std::vector<std::uint8_t>& lengths) {
        Buffer<std::int32_t> sums(target.gemm->rows * kPanel);
        target.gemm->tile(target.gemm->rows, 1,
                          {x.rows().codes, x.rows().stride, b.data(), quads * kStepBytes, quads, sums.data(),
                           kPanel, false, lengths.data(), nullptr});
        return sums.data()[5] == static_cast<std::int32_t>(quads * 4 * 7 * 255);
    };
    check(right(runs), "proved runs", target, w, 1);
    for (std::size_t longer = 2; longer < 5; ++longer) {
        std::vector<std::uint8_t> wrong(runs);
        wrong[0] = static_cast<std::uint8_t>(wrong[0] + longer);
        wrong[1] = static_cast<std::uint8_t>(wrong[1] - longer);
        check(!right(wrong), "the control: a run that is too long is wrong", target, w, 1);
    }
}

void check_runs() {
    alignas(64) std::int8_t b[64 * 300] = {};
    std::vector<std::uint8_t> runs;
    check(append_runs(b, 300, &runs) && runs == std::vector<std::uint8_t>({252, 48}), "runs of zeros");
    for (std::size_t i = 0; i < sizeof b; ++i) b[i] = i % 2 == 0 ? 64 : -64;
    runs.clear();
    check(append_runs(b, 4, &runs) && runs == std::vector<std::uint8_t>({2, 2}), "signs are counted apart");
    b[64] = b[65] = 65;
    check(!append_runs(b, 2, &runs), "a quad that is too heavy alone");
}

void check_refusals() {
    Random random;
    const Matrix w(8, 8, {4, 1, -8}, random);
    const Target& target = targets().back();
    const auto refused = [&](Weight weight, Grid grid = Grid{}) {
        try {
            Weights(target, weight, grid);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    Weight weight = w.weight();
    check(!refused(weight), "a good weight");
    for (const int bits : {0, 1, 3, 16}) weight.bits = bits, check(refused(weight), "bits");
    weight = w.weight(), weight.spacing = 20, check(refused(weight), "values beyond 8 bits");
    weight = w.weight(), weight.low = -129, check(refused(weight), "values beyond 8 bits");
    weight = w.weight(), weight.in = kMostInputs + 1, check(refused(weight), "too many inputs");
    weight = w.weight(), weight.out = 0, check(refused(weight), "no outputs");
    check(refused(w.weight(), Grid{0.0f, 0, 0, 255}), "a scale of 0");
    check(refused(w.weight(), Grid{1.0f, 0, 0, 256}), "codes beyond 255");
    std::string problem;
    check(find_target("nothing", &problem) == nullptr && problem.find("scalar") != std::string::npos,
          "names");
}

// Names that the training extension has, for both read MREM_CPU_TARGET.
void check_shared_names() {
    std::string problem;
    const Target* wide = named_target("avx512", &problem);
    check(mrem::cpu_features().avx512f() ? wide == &best_target()
                                         : problem.find("AVX-512 Foundation") != std::string::npos,
          "avx512 is the best target of a processor that has it");
    for (const Target& target : targets()) {
        check(named_target(target.name(), &problem) == (target.supported() ? &target : nullptr), "own names");
    }
    for (const char* unknown : {"sse9", "AVX512", "avx512 ", ""}) {
        check(named_target(unknown, &problem) == nullptr, "other names are errors");
    }
}

}  // namespace

int main(int argc, char**) {
    const bool few = argc > 1;  // any argument: without the large products, for sanitizers
    Random random;
    check_layout();
    check_runs();
    check_refusals();
    check_shared_names();
    const Coding codings[] = {{2, 1, -1}, {2, 2, -3}, {4, 1, -8}, {8, 1, -128}, {4, 16, -120}, {2, 85, -128}};
    for (const Target* each : runnable_targets()) {
        const Target& target = *each;
        if (target.gemm->cuts) check_runs_too_long(target);
        for (const Coding& coding : codings) {
            for (const std::size_t in : {1, 3, 15, 16, 17, 63, 64, 65, 384, 1537, 3072}) {
                for (const std::size_t out : {1, 15, 16, 17, 33, 65}) {
                    if (few && in * out > 30000) continue;
                    Matrix w(in, out, coding, random);
                    for (const std::size_t rows : {1, 2, 5, 13, 31}) {
                        check_product(target, w, rows, Values::kRandom, random);
                    }
                    check_product(target, w, 7, Values::kHigh, random);
                    check_product(target, w, 7, Values::kAlternating, random);
                    w.fill(0), check_product(target, w, 6, Values::kHigh, random);
                    w.fill((1 << coding.bits) - 1), check_product(target, w, 6, Values::kHigh, random);
                }
            }
        }
        std::printf("%s: passed\n", target.name());
    }
    std::puts("gemm: all C++ tests passed");
    return 0;
}
