// Tests of the training kernels without Python, for the sanitizers: every target that this machine can run
// against plain loops over the formulas of kernels.h, in heap blocks of exactly the contract's size.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "training.h"

namespace {

using Floats = std::vector<float>;

void check(bool holds, const char* what, const mrem::Kernels& kernels, std::size_t size) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (target %s, size %zu)\n", what, kernels.name, size);
    std::exit(1);
}

// Equal, where NaN equals NaN and the sign of zero does not count.
bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same(const Floats& a, const Floats& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!same(a[i], b[i])) return false;
    }
    return a.size() == b.size();
}

// Ordinary numbers, with ties, both ends of the range, huge and denormal ones, and (if asked) NaN and Inf.
Floats hostile(std::size_t n, std::mt19937& random, bool with_nan) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float special[] = {0.5f, 1.5f, -2.5f, 3e38f, -3e38f, 1e-45f, -0.0f, kInf, -kInf, NAN};
    const std::size_t kinds = with_nan ? 10 : 7;
    std::normal_distribution<float> draw(0.0f, 3.0f);
    Floats values(n);
    for (float& value : values) value = random() % 8 == 0 ? special[random() % kinds] : draw(random);
    return values;
}

float code(float x, float scale, mrem::Range range) {
    float value = std::nearbyint(x / scale);
    if (value < range.low) value = range.low;
    if (value > range.high) value = range.high;
    return value;
}

mrem::View matrix(const Floats& x, std::size_t rows, std::size_t columns) {
    return {x.data(), {1, 1, rows}, {0, 0, static_cast<std::ptrdiff_t>(columns)}, columns};
}

void check_quantize(const mrem::Kernels& kernels, std::size_t rows, std::size_t columns, bool per_row,
                    std::mt19937& random) {
    const std::size_t n = rows * columns;
    const mrem::Range range{-3, 4};
    const Floats x = hostile(n, random, true), grad = hostile(n, random, false);
    Floats scales(per_row ? rows : 1);
    for (float& scale : scales) scale = 0.25f + static_cast<float>(random() % 8) * 0.25f;
    const mrem::View view = matrix(x, rows, columns);
    const mrem::Scales given{scales.data(), scales.size()};

    Floats integers(n), values(n), expected_integers(n), expected_values(n), expected_grad(n);
    std::vector<double> expected_sums(scales.size(), 0.0);
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t at = scales.size() == 1 ? 0 : i / columns;
        const float scale = scales[at], ratio = x[i] / scale;
        const float moved = code(x[i], scale, range) - ratio;
        const bool saturated = std::fabs(moved) > 0.5f;
        expected_integers[i] = code(x[i], scale, range);
        expected_values[i] = expected_integers[i] * scale;
        expected_grad[i] = saturated ? 0.0f : grad[i];
        const float by_step = (saturated ? expected_integers[i] : moved) * grad[i];
        expected_sums[at] += static_cast<double>(by_step);
    }
    mrem::quantize(kernels, view, given, range, false, integers.data(), 1);
    mrem::quantize(kernels, view, given, range, true, values.data(), 2);
    check(same(integers, expected_integers), "integers", kernels, n);
    check(same(values, expected_values), "dequantized values", kernels, n);

    Floats once(n), twice = grad, sums(scales.size()), sums_again(scales.size());
    mrem::quantize_backward(kernels, grad.data(), view, given, range, once.data(), sums.data(), 1);
    mrem::quantize_backward(kernels, twice.data(), view, given, range, twice.data(), sums_again.data(), 2);
    check(same(once, expected_grad) && same(twice, expected_grad), "gradient of x, also in place", kernels,
          n);
    for (std::size_t i = 0; i < sums.size(); ++i) {
        const double bound = 1e-6 * std::fabs(expected_sums[i]) + 1e-30;
        const bool close = std::fabs(static_cast<double>(sums[i]) - expected_sums[i]) <= bound;
        const bool finite = std::isfinite(static_cast<float>(expected_sums[i]));
        check(finite ? close : !std::isfinite(sums[i]), "gradient of the step", kernels, n);
        check(std::memcmp(&sums[i], &sums_again[i], sizeof(float)) == 0, "threads change a sum", kernels, n);
    }
}

void check_strided(const mrem::Kernels& kernels, std::mt19937& random) {
    // (2, 3, 5, 7) inside a (2, 5, 3, 7) block: the layout of attention's heads.
    const Floats stored = hostile(2 * 5 * 3 * 7, random, false);
    const mrem::View view{stored.data(), {2, 3, 5}, {105, 7, 21}, 7};
    const float scale = 0.5f;
    Floats out(stored.size());
    mrem::quantize(kernels, view, {&scale, 1}, {-8, 7}, false, out.data(), 2);
    std::size_t at = 0;
    for (std::size_t a = 0; a < 2; ++a)
        for (std::size_t b = 0; b < 3; ++b)
            for (std::size_t c = 0; c < 5; ++c)
                for (std::size_t d = 0; d < 7; ++d, ++at)
                    check(out[at] == code(stored[a * 105 + b * 7 + c * 21 + d], scale, {-8, 7}), "strided",
                          kernels, at);
}

void check_weights(const mrem::Kernels& kernels, std::size_t rows, std::size_t columns, bool per_row,
                   std::mt19937& random) {
    const std::size_t n = rows * columns, scales = per_row ? rows : 1, each = n / scales;
    std::normal_distribution<float> draw(0.0f, 0.1f);
    Floats w(n), diagonal(n), start(scales, 0.6f);
    for (std::size_t i = 0; i < n; ++i) w[i] = draw(random), diagonal[i] = std::fabs(draw(random));
    const mrem::Range range{-7, 7};

    Floats threshold(scales), scale(scales), codes(n), factors(n), alpha(scales);
    mrem::twn(kernels, w.data(), rows, columns, per_row, threshold.data(), scale.data(), 2);
    const mrem::View view = matrix(w, rows, columns);
    const mrem::Scales deltas{threshold.data(), scales};
    mrem::quantize_by_threshold(kernels, view, deltas, {0, 1}, nullptr, codes.data(), 2);
    mrem::quantize_by_threshold(kernels, view, deltas, {0, 1}, scale.data(), factors.data(), 1);
    mrem::laq(kernels, w.data(), start.data(), diagonal.data(), rows, columns, range, 2, per_row,
              alpha.data(), 2);
    for (std::size_t s = 0; s < scales; ++s) {
        double magnitudes = 0, kept = 0, count = 0;
        for (std::size_t i = s * each; i < (s + 1) * each; ++i) magnitudes += std::fabs(w[i]);
        const double delta = 0.7 * magnitudes / static_cast<double>(each);
        check(std::fabs(static_cast<double>(threshold[s]) - delta) <= 1e-6 * delta, "threshold", kernels, n);
        for (std::size_t i = s * each; i < (s + 1) * each; ++i) {
            const bool above = std::fabs(w[i]) > threshold[s];
            if (above) kept += std::fabs(w[i]), count += 1;
            const float expected = above ? (w[i] > 0 ? 1.0f : -1.0f) : 0.0f;
            check(codes[i] == expected && factors[i] == expected * scale[s], "ternary codes", kernels, n);
        }
        const double mean = count > 0 ? kept / count : 1.0;
        check(std::fabs(static_cast<double>(scale[s]) - mean) <= 1e-6 * mean, "TWN's scale", kernels, n);

        float a = 0.6f * static_cast<float>(magnitudes / static_cast<double>(each));
        for (int iteration = 0; iteration < 2; ++iteration) {
            double numerator = 0, denominator = 0;
            for (std::size_t i = s * each; i < (s + 1) * each; ++i) {
                const double b = code(w[i], a, range), d = diagonal[i];
                numerator += d * static_cast<double>(w[i]) * b;
                denominator += d * b * b;
            }
            if (numerator > 0 && denominator > 0) a = static_cast<float>(numerator / denominator);
        }
        check(std::fabs(alpha[s] - a) <= 1e-6f * a, "LAQ's scale", kernels, n);
    }
}

// α = Σ|w|q / Σq², twice; then codes ±1 and ±3 at Δ = 2α, and what becomes of hostile values.
void check_midrise(const mrem::Kernels& kernels, std::size_t rows, std::size_t columns, bool per_row,
                   std::mt19937& random) {
    const std::size_t n = rows * columns, scales = per_row ? rows : 1, each = n / scales;
    std::normal_distribution<float> draw(0.0f, 0.1f);
    Floats w(n), threshold(scales), scale(scales), again(scales), alone(scales);
    for (float& value : w) value = draw(random);
    for (std::size_t i = 0; per_row && i < columns; ++i) w[i] = 0.0f;  // a row of zeros
    mrem::midrise(kernels, w.data(), rows, columns, per_row, threshold.data(), scale.data(), 2);
    mrem::midrise(kernels, w.data(), rows, columns, per_row, again.data(), alone.data(), 1);
    check(same(threshold, again) && same(scale, alone), "threads change a midrise scale", kernels, n);
    for (std::size_t s = 0; s < scales; ++s) {
        double magnitudes = 0;
        for (std::size_t i = s * each; i < (s + 1) * each; ++i) magnitudes += std::fabs(w[i]);
        double a = 0.625 * magnitudes / static_cast<double>(each);
        for (int alternation = 0; alternation < 2; ++alternation) {
            double numerator = 0, denominator = 0;
            for (std::size_t i = s * each; i < (s + 1) * each; ++i) {
                const double q = std::fabs(w[i]) > 2 * static_cast<float>(a) ? 3 : 1;
                numerator += std::fabs(w[i]) * q;
                denominator += q * q;
            }
            a = numerator / denominator;
        }
        a = a < 0x1p-100 ? 0x1p-100 : a;
        check(std::fabs(static_cast<double>(scale[s]) - a) <= 1e-6 * a, "midrise scale", kernels, n);
        check(threshold[s] == 2 * scale[s], "midrise threshold", kernels, n);
    }

    const Floats x = hostile(n, random, true);
    Floats deltas(scales), codes(n), values(n);
    for (float& delta : deltas) delta = static_cast<float>(random() % 4);
    const mrem::View view = matrix(x, rows, columns);
    mrem::quantize_by_threshold(kernels, view, {deltas.data(), scales}, {1, 3}, nullptr, codes.data(), 2);
    mrem::quantize_by_threshold(kernels, view, {deltas.data(), scales}, {1, 3}, scale.data(), values.data(),
                                1);
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t s = i / each;
        const float magnitude = std::fabs(x[i]) > deltas[s] ? 3.0f : 1.0f;
        const float expected = std::isnan(x[i]) ? x[i] : x[i] < 0 ? -magnitude : magnitude;
        check(same(codes[i], expected), "midrise codes", kernels, n);
        check(same(values[i], expected * scale[s]), "midrise values", kernels, n);
    }
}

void check_product(const mrem::Kernels& kernels, std::size_t rows, std::size_t columns, bool one_scale,
                   bool with_bias, std::mt19937& random) {
    const Floats product = hostile(rows * columns, random, true), bias = hostile(columns, random, false);
    const Floats scales = hostile(one_scale ? 1 : columns, random, false);
    Floats scaled = product;
    mrem::scale_product(kernels, scaled.data(), rows, columns, scales.data(), one_scale,
                        with_bias ? bias.data() : nullptr, 2);
    for (std::size_t i = 0; i < scaled.size(); ++i) {
        const std::size_t column = i % columns;
        float expected = product[i] * scales[one_scale ? 0 : column];
        if (with_bias) expected += bias[column];
        check(same(scaled[i], expected), "scaled product", kernels, rows * columns);
    }
}

void check_dispatch() {
    const mrem::Kernels& active = mrem::active_kernels();
    check(&mrem::find_target(active.name) == &active, "the active target is on the list", active, 0);
    check(mrem::targets().back().kernels == &mrem::kScalarKernels, "scalar comes last", active, 0);
    for (const mrem::Target& target : mrem::targets()) {
        if (!target.supported(mrem::cpu_features())) continue;
        const std::string name = target.kernels->name;
        std::vector<std::string> names = {name};  // and those of the runtime that mean the same
        if (name == "avx2") names.push_back("avxvnni");
        if (name == "avx512") names.insert(names.end(), {"avx512vnni", "amx"});
        for (const std::string& each : names) {
            check(&mrem::named_target(each) == target.kernels, "a name in MREM_CPU_TARGET", active, 0);
        }
    }
    bool refused = false;
    try {
        mrem::use_target("sse9");
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    check(refused && &mrem::active_kernels() == &active, "an unknown target changes nothing", active, 0);
}

}  // namespace

int main() {
    std::mt19937 random(0);
    check_dispatch();
    // 1 to 70 columns pass every remainder of sixteen lanes; then primes, and more than one block of floats.
    std::vector<std::pair<std::size_t, std::size_t>> shapes;
    for (std::size_t columns = 1; columns <= 70; ++columns) shapes.push_back({3, columns});
    shapes.insert(shapes.end(), {{1, 1}, {97, 1}, {1, 127}, {31, 1021}, {3, 16384}, {2, 40009}});
    for (const mrem::Target& target : mrem::targets()) {
        if (!target.supported(mrem::cpu_features())) {
            std::printf("training: target %s left out, it needs %s\n", target.kernels->name, target.needs);
            continue;
        }
        for (const auto& [rows, columns] : shapes) {
            for (const bool flag : {false, true}) {
                check_quantize(*target.kernels, rows, columns, flag, random);
                check_weights(*target.kernels, rows, columns, flag, random);
                check_midrise(*target.kernels, rows, columns, flag, random);
                check_product(*target.kernels, rows, columns, flag, true, random);
                check_product(*target.kernels, rows, columns, flag, false, random);
            }
        }
        check_strided(*target.kernels, random);
        check_quantize(*target.kernels, 3, 1398103, false, random);  // past the caches, with a remainder
        check_quantize(*target.kernels, 4, 1048592, true, random);
        check_weights(*target.kernels, 70, 16411, true, random);  // enough blocks for two threads
        check_midrise(*target.kernels, 70, 16411, true, random);
        std::printf("training: all C++ tests passed on target %s\n", target.kernels->name);
    }
    return 0;
}
