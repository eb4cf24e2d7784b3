// Tests of the float kernels: every target gives the bits of the portable ones, for all lengths, and those
// are as close to a computation in double as their contract says.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "float_kernels.h"
#include "targets.h"

using namespace mrem::runtime;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void check(bool holds, const char* what, const char* target, double where) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (%s, at %.9g)\n", what, target, where);
    std::exit(1);
}

// Heap blocks of exactly n values, so that a sanitizer sees one too many.
template <class T>
struct Exact {
    std::size_t size;
    std::unique_ptr<T[]> values;
    explicit Exact(std::size_t n) : size(n), values(new T[n]()) {}
    Exact(const Exact& other) : Exact(other.size) { std::copy(other.data(), other.data() + size, data()); }
    T* data() const { return values.get(); }
    T& operator[](std::size_t i) const { return values[i]; }
};
using Floats = Exact<float>;
using Bytes = Exact<std::uint8_t>;

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

void check_same(const Floats& found, const Floats& expected, const char* what, const char* target) {
    for (std::size_t i = 0; i < found.size; ++i)
        check(same(found[i], expected[i]), what, target, expected[i]);
}

void check_same(const Bytes& found, const Bytes& expected, const char* what, const char* target) {
    for (std::size_t i = 0; i < found.size; ++i) check(found[i] == expected[i], what, target, expected[i]);
}

const FloatKernels& portable = kScalarFloats;
std::mt19937 engine{1};

Floats random_floats(std::size_t n, float width) {
    std::normal_distribution<float> normal(0.0f, width);
    Floats x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = normal(engine);
    return x;
}

// Numbers that are seldom drawn.
const std::vector<float> kOdd = {0.0f,    -0.0f,     kInfinity, -kInfinity, kNan,     -kNan,    1e-45f,
                                 -1e-45f, 1.17e-38f, -1e-38f,   3.4e38f,    -3.4e38f, 0x1p-24f, 0x1p24f,
                                 1e10f,   -1e10f,    0.5f,      -0.5f,      1.5f,     2.5f,     -2.5f,
                                 5.4f,    5.4001f,   -5.4f,     -86.99f,    -87.0f,   -87.01f,  -103.0f,
                                 -104.0f, 88.0f,     100.0f,    -1e-3f};

void mix_in_odd(const Floats& x) {
    for (std::size_t i = 0; i < x.size; ++i) {
        if (engine() % 3 == 0) x[i] = kOdd[engine() % kOdd.size()];
    }
}

Grid random_grid() {
    static const Grid fixed[] = {{0.03f, 128, 0, 255},  {0.11f, 128, 121, 135},  {1.0f / 255, 0, 0, 255},
                                 {0.02f, 9, 0, 255},    {1.0f / 3, 128, 1, 255}, {0x1p-20f, 255, 0, 255},
                                 {1e-30f, 128, 0, 255}, {1e30f, 128, 0, 255},    {1e-45f, 128, 0, 255},
                                 {3e38f, 0, 0, 255},    {0.7f, 0, 5, 5},         {0.5f, 255, 0, 0}};
    Grid grid = fixed[engine() % 12];
    if (engine() % 2 == 0) grid.scale *= 1.0f + static_cast<float>(engine() % 1000) / 1000.0f;
    if (!std::isfinite(grid.scale)) grid.scale = 3e38f;
    return grid;
}

void compare_sums(const FloatKernels& kernels, std::size_t n, const Grid& grid, bool odd) {
    constexpr std::size_t kRows = 7;  // four at once, two, and one
    const std::size_t stride = round_up(n, kPanel);
    const Exact<std::int32_t> sums(kRows * stride), shifts(kRows);
    for (std::size_t i = 0; i < sums.size; ++i) {
        sums[i] = static_cast<std::int32_t>(engine() % 2000000) - 1000000;
    }
    for (std::size_t i = 0; i < kRows; ++i) shifts[i] = static_cast<std::int32_t>(engine() % 20000) - 10000;
    const Exact<Columns> by(stride / kPanel);
    for (std::size_t c = 0; c < stride; ++c) {
        Columns& panel = by[c / kPanel];
        panel.offset[c % kPanel] = static_cast<std::int32_t>(engine() % 100000);
        panel.scale[c % kPanel] = odd && engine() % 9 == 0 ? kOdd[engine() % kOdd.size()] : 1e-6f;
        panel.bias[c % kPanel] = odd && engine() % 9 == 0 ? kOdd[engine() % kOdd.size()] : 0.25f;
    }
    for (const bool gelu : {false, true}) {
        const Bytes codes(kRows * (n + 3)), expected(kRows * (n + 3));
        const SumRows rows{sums.data(), kRows,     n,
                           stride,      by.data(), engine() % 2 == 0 ? shifts.data() : nullptr};
        kernels.quantize_sums(rows, grid, gelu, codes.data(), n + 3);
        portable.quantize_sums(rows, grid, gelu, expected.data(), n + 3);
        check_same(codes, expected, gelu ? "quantize_sums after GELU" : "quantize_sums", kernels.name);
    }
}

void compare_rows(const FloatKernels& kernels, std::size_t n, const float* added) {
    for (const int bits : {2, 4, 8}) {
        const Bytes bytes((n * static_cast<std::size_t>(bits) + 7) / 8);
        for (std::size_t i = 0; i < bytes.size; ++i) bytes[i] = static_cast<std::uint8_t>(engine() % 256);
        const PackedRow row{bytes.data(), bits, bits == 8 ? 1 : 3, bits == 8 ? -128 : -7, 0.0137f};
        const Floats y(n), expected(n);
        for (const float* more : {added, static_cast<const float*>(nullptr)}) {
            kernels.expand(row, more, n, y.data());
            portable.expand(row, more, n, expected.data());
            check_same(y, expected, "expand", kernels.name);
        }
    }
}

void compare_norms(const FloatKernels& kernels, std::size_t n, const float* gamma, const float* beta) {
    constexpr std::size_t kRows = 7;
    const Floats x = random_floats(kRows * n, 3.0f), residual = random_floats(kRows * n, 1.0f);
    const Floats y(kRows * n), expected(kRows * n);
    const float *from[kRows], *added[kRows];
    float *to[kRows], *wanted[kRows];
    for (std::size_t i = 0; i < kRows; ++i) {
        from[i] = x.data() + i * n, added[i] = residual.data() + (i * 3 % kRows) * n;
        to[i] = y.data() + (i * 2 % kRows) * n, wanted[i] = expected.data() + (i * 2 % kRows) * n;
    }
    kernels.layer_norm(kRows, from, added, n, gamma, beta, 1e-5f, to);
    portable.layer_norm(kRows, from, added, n, gamma, beta, 1e-5f, wanted);
    check_same(y, expected, "layer_norm of several rows", kernels.name);
}

void compare(const FloatKernels& kernels, std::size_t n, bool odd) {
    const char* name = kernels.name;
    const Floats x = random_floats(n, 3.0f), residual = random_floats(n, 1.0f);
    const Floats gamma = random_floats(n, 1.0f), beta = random_floats(n, 1.0f);
    if (odd) mix_in_odd(x), mix_in_odd(residual);
    Floats y(n), expected(n);
    Bytes codes(n), expected_codes(n);

    const Grid grid = random_grid();
    if (engine() % 2 == 0) {  // around the ties of this grid
        for (std::size_t i = 0; i < n; ++i) {
            x[i] = (static_cast<float>(static_cast<int>(engine() % 520) - 260) + 0.5f) * grid.scale;
            if (engine() % 2 == 0) x[i] = std::nextafter(x[i], engine() % 2 == 0 ? kInfinity : -kInfinity);
        }
    }
    kernels.quantize(x.data(), n, grid, codes.data());
    portable.quantize(x.data(), n, grid, expected_codes.data());
    check_same(codes, expected_codes, "quantize", name);
    kernels.gelu(x.data(), n, y.data());
    portable.gelu(x.data(), n, expected.data());
    check_same(y, expected, "gelu", name);
    kernels.gelu_quantize(x.data(), n, grid, codes.data());
    portable.gelu_quantize(x.data(), n, grid, expected_codes.data());
    check_same(codes, expected_codes, "gelu_quantize", name);

    const float* added = engine() % 3 == 0 ? nullptr : residual.data();
    layer_norm(kernels, x.data(), added, n, gamma.data(), beta.data(), 1e-12f, y.data());
    layer_norm(portable, x.data(), added, n, gamma.data(), beta.data(), 1e-12f, expected.data());
    check_same(y, expected, "layer_norm", name);
    Floats here(x), there(x);  // in place
    layer_norm(kernels, here.data(), added, n, gamma.data(), beta.data(), 1e-5f, here.data());
    layer_norm(portable, there.data(), added, n, gamma.data(), beta.data(), 1e-5f, there.data());
    check_same(here, there, "layer_norm in place", name);

    Floats soft(x), expected_soft(x);
    kernels.softmax(soft.data(), n);
    portable.softmax(expected_soft.data(), n);
    check_same(soft, expected_soft, "softmax", name);

    constexpr std::size_t kRows = 7;  // four at once, two, and one
    const std::size_t stride = n + 5;
    Exact<std::int32_t> sums(kRows * stride), offsets(n);
    for (std::size_t i = 0; i < sums.size; ++i) {
        sums[i] = static_cast<std::int32_t>(engine() % 2000000) - 1000000;
    }
    for (std::size_t i = 0; i < n; ++i) offsets[i] = static_cast<std::int32_t>(engine() % 100000);
    const Floats work(kRows * stride), expected_work(kRows * stride);
    const Bytes all_codes(kRows * stride), expected_all(kRows * stride);
    for (std::size_t i = 0; i < all_codes.size; ++i) all_codes[i] = expected_all[i] = 77;
    const float scale =
        std::vector<float>{1e-5f, 1e-6f, 1e-3f, 1e-38f, 3e38f, 0.0f, -1.0f, kNan}[engine() % 8];
    const Scores scores{sums.data(), kRows, n, stride, offsets.data(), scale};
    kernels.softmax_quantize(scores, grid, work.data(), all_codes.data(), stride);
    portable.softmax_quantize(scores, grid, expected_work.data(), expected_all.data(), stride);
    check_same(all_codes, expected_all, "softmax_quantize", name);
    compare_sums(kernels, n, grid, odd);
    compare_rows(kernels, n, beta.data());
    compare_norms(kernels, n, gamma.data(), beta.data());
}

// Codes of every float of two octaves, where quotients come closest to ties and to other floats.
void compare_quotients(const FloatKernels& kernels, float scale, std::size_t count) {
    const Grid grid{scale, 128, 0, 255};
    const Floats x(4096);
    const Bytes codes(4096), expected(4096);
    std::uint32_t start;
    const float first = 120.0f * scale;
    std::memcpy(&start, &first, sizeof start);
    start += engine() % 64;
    for (std::size_t done = 0; done < count; done += x.size) {
        for (std::size_t i = 0; i < x.size; ++i, start += 37) std::memcpy(&x[i], &start, sizeof start);
        kernels.quantize(x.data(), x.size, grid, codes.data());
        portable.quantize(x.data(), x.size, grid, expected.data());
        check_same(codes, expected, "quantize near ties", kernels.name);
    }
}

// ------------------------------------------------------------------- the portable ones against double

// By softmax of (0, x), over the range where the result is not 0.
double worst_exp() {
    double worst = 0.0;
    for (float x = -1e-4f; x > -86.9f; x *= 1.0f + 0x1p-15f) {
        float row[2] = {0.0f, x};
        portable.softmax(row, 2);
        const double exact = std::exp(static_cast<double>(x)) / (1.0 + std::exp(static_cast<double>(x)));
        worst = std::fmax(worst, std::fabs(row[1] - exact) / exact);
    }
    return worst;
}

double worst_gelu() {
    double worst = 0.0;
    for (float x = -12.0f; x < 12.0f; x += 0x1p-14f) {
        float y;
        portable.gelu(&x, 1, &y);
        const double exact = 0.5 * x * std::erfc(-x / std::sqrt(2.0));
        worst = std::fmax(worst, std::fabs(y - exact));
    }
    return worst;
}

double worst_layer_norm() {
    double worst = 0.0;
    for (const std::size_t n : {1, 5, 64, 384, 768, 4096}) {
        for (const float mean : {0.0f, 3.0f, -100.0f}) {
            Floats x = random_floats(n, 1.0f);
            const Floats gamma = random_floats(n, 1.0f), beta = random_floats(n, 0.1f), y(n);
            for (std::size_t i = 0; i < n; ++i) x[i] += mean;
            layer_norm(portable, x.data(), nullptr, n, gamma.data(), beta.data(), 1e-5f, y.data());
            double sum = 0.0, squares = 0.0;
            for (std::size_t i = 0; i < n; ++i) sum += x[i];
            const double middle = sum / static_cast<double>(n);
            for (std::size_t i = 0; i < n; ++i) squares += (x[i] - middle) * (x[i] - middle);
            const double deviation = std::sqrt(squares / static_cast<double>(n) + 1e-5f);
            for (std::size_t i = 0; i < n; ++i) {
                const double exact = (x[i] - middle) / deviation * gamma[i] + beta[i];
                // The mean is rounded to a float, which matters in proportion to it.
                const double unit = (1.0 + std::fabs(middle) / deviation) * std::fmax(std::fabs(exact), 1.0);
                worst = std::fmax(worst, std::fabs(y[i] - exact) / unit);
            }
        }
    }
    return worst;
}

double worst_softmax() {
    double worst = 0.0;
    for (const std::size_t n : {1, 2, 17, 128, 512, 4096}) {
        Floats x = random_floats(n, 4.0f);
        std::vector<double> exact(n), distance(n);
        double most = -1e300, sum = 0.0;
        for (std::size_t i = 0; i < n; ++i) most = std::fmax(most, x[i]);
        for (std::size_t i = 0; i < n; ++i) {
            distance[i] = x[i] - most;
            sum += exact[i] = std::exp(distance[i]);
        }
        portable.softmax(x.data(), n);
        for (std::size_t i = 0; i < n; ++i) {
            const double p = exact[i] / sum;
            // The distance to the largest is rounded to a float, which matters in proportion to it.
            worst = std::fmax(worst, std::fabs(x[i] - p) / p / (1.0 - distance[i]));
        }
    }
    return worst;
}

// The largest distance of a ratio to what its code stands for, beyond the half that rounding takes.
double worst_softmax_code() {
    double worst = 0.0;
    for (const std::size_t n : {1, 2, 17, 128, 512}) {
        const Exact<std::int32_t> sums(n), offsets(n);
        for (std::size_t i = 0; i < n; ++i) {
            sums[i] = static_cast<std::int32_t>(engine() % 60000);
            offsets[i] = static_cast<std::int32_t>(engine() % 1000);
        }
        const Floats work(n);
        const Bytes codes(n);
        for (const double scale : {1e-6, 3e-5, 2e-4, 5e-3, 1.0}) {
            std::vector<double> exact(n);
            double most = -1e300, sum = 0.0;
            for (std::size_t i = 0; i < n; ++i) most = std::fmax(most, sums[i] - offsets[i]);
            for (std::size_t i = 0; i < n; ++i) {
                sum += exact[i] =
                    std::exp((sums[i] - offsets[i] - most) * static_cast<double>(static_cast<float>(scale)));
            }
            portable.softmax_quantize({sums.data(), 1, n, n, offsets.data(), static_cast<float>(scale)},
                                      {1.0f / 255.0f, 0, 0, 255}, work.data(), codes.data(), n);
            for (std::size_t i = 0; i < n; ++i) {
                const double ratio = exact[i] / sum / static_cast<double>(1.0f / 255.0f);
                worst = std::fmax(worst, std::fabs(ratio - codes[i]) - 0.5);
            }
        }
    }
    return worst;
}

void check_codes_by_hand() {
    const Grid grid{0.5f, 128, 1, 255};
    const float x[] = {0.0f, 0.25f,     0.75f, -0.25f,     -0.75f, 63.5f,
                       1e9f, kInfinity, -1e9f, -kInfinity, kNan,   -0.0f};
    const int expected[] = {128, 128, 130, 128, 126, 255, 255, 255, 1, 1, 1, 128};
    std::uint8_t codes[12];
    portable.quantize(x, 12, grid, codes);
    for (int i = 0; i < 12; ++i) check(codes[i] == expected[i], "codes by hand", "scalar", x[i]);
}

void check_bound(double found, double bound, const char* what) {
    std::printf("  %-40s %.3g (at most %.3g)\n", what, found, bound);
    check(found <= bound, what, "scalar", found);
}

}  // namespace

int main() {
    check_codes_by_hand();
    // exp: 1.2e-7 relative by the polynomial, then a sum, a reciprocal and a product: four roundings of 6e-8.
    check_bound(worst_exp(), 3.6e-7, "exp, relative error");
    check_bound(worst_gelu(), 2.4e-7 + 4.8e-7, "GELU, absolute error in -12 to 12");
    check_bound(worst_softmax(), 5e-7, "softmax, relative error per unit");
    // 255 times the relative error of a power, a sum, a reciprocal and two products
    check_bound(worst_softmax_code(), 255 * 5e-7, "codes of a softmax, beyond one half");
    check_bound(worst_layer_norm(), 5e-7, "LayerNorm, error per unit");
    for (const Target& target : targets()) {
        const FloatKernels& kernels = *target.floats;
        if (!target.supported() || &kernels == &portable) continue;
        for (std::size_t n = 0; n <= 70; ++n) {
            for (int round = 0; round < 12; ++round) compare(kernels, n, round % 3 == 0);
        }
        for (const std::size_t n : {384, 768, 1000, 3072})
            compare(kernels, n, false), compare(kernels, n, true);
        for (int i = 0; i < 40; ++i) {
            compare_quotients(kernels, std::ldexp(1.0f + static_cast<float>(engine() % 65536) / 65536.0f, -6),
                              1 << 16);
        }
        // Reciprocals that round worst: just above and below powers of two.
        for (const float scale :
             {1.0f, 0x1.000002p0f, 0x1.fffffep-1f, 0x1.fffffcp-1f, 0x1.8p0f, 0x1.555556p-6f}) {
            compare_quotients(kernels, scale, 1 << 18);
        }
        std::printf("  %s: the same bits as portable code\n", target.name());
    }
    std::puts("float kernels: ok");
    return 0;
}
