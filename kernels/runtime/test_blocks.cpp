// Tests of the blocks without onnxruntime, on every target that this machine can run: equal, bit for bit, to
// the plain versions (reference.h), whatever else is in the batch and however many threads there are.
#include "blocks.h"
#include "reference.h"
#include "test_tools.h"

using namespace mrem::runtime;
using namespace mrem::runtime::testing;

namespace {

struct Batch {
    std::size_t batch, tokens;
    std::vector<std::int64_t> mask;
};

// Masks with padding on both sides, gaps, and sequences of nothing.
Batch batch_of(std::size_t batch, std::size_t tokens, int holes, Random& random) {
    Batch made{batch, tokens, std::vector<std::int64_t>(batch * tokens, 1)};
    if (holes == 0) return made;
    for (std::size_t s = 0; s < batch; ++s) {
        const std::size_t length = random.below(tokens + 1);
        for (std::size_t i = 0; i < tokens; ++i) {
            const bool real = holes == 1 ? i < length : holes == 2 ? i >= length : random.below(3) != 0;
            made.mask[s * tokens + i] = real ? (holes == 3 ? -5 : 1) : 0;
        }
    }
    return made;
}

void check_rows(const std::vector<float>& y, const std::vector<float>& expected, const char* what,
                const Target& target, std::size_t hidden) {
    for (std::size_t i = 0; i < y.size(); ++i) {
        if (same_bits(y[i], expected[i])) continue;
        std::fprintf(stderr, "FAILED: %s on %s, width %zu: row %zu, column %zu: %.9g instead of %.9g\n", what,
                     target.name(), hidden, i / hidden, i % hidden, static_cast<double>(y[i]),
                     static_cast<double>(expected[i]));
        std::exit(1);
    }
}

// All examples together, with one thread and several; then each alone, without its padding.
template <class Run>
void check_block(const Run& run, const Batch& batch, std::size_t hidden, const std::vector<float>& x,
                 const std::vector<float>& expected, const char* what, const Target& target) {
    const auto compute = [&](const float* from, const std::int64_t* mask, std::size_t sequences,
                             std::size_t tokens, Pool& pool) {
        std::vector<float> y(sequences * tokens * hidden, 99.0f);
        run(from, mask, sequences, tokens, pool, y.data());
        return y;
    };
    OneThread alone;
    check_rows(compute(x.data(), batch.mask.data(), batch.batch, batch.tokens, alone), expected, what, target,
               hidden);
    for (const std::size_t threads : {2, 3, 5}) {
        ThreadPool pool(threads);
        check_rows(compute(x.data(), batch.mask.data(), batch.batch, batch.tokens, pool), expected, what,
                   target, hidden);
    }
    for (std::size_t s = 0; s < batch.batch; ++s) {
        std::vector<float> rows, wanted;
        for (std::size_t i = s * batch.tokens; i < (s + 1) * batch.tokens; ++i) {
            if (batch.mask[i] == 0) continue;
            rows.insert(rows.end(), x.begin() + static_cast<std::ptrdiff_t>(i * hidden),
                        x.begin() + static_cast<std::ptrdiff_t>((i + 1) * hidden));
            wanted.insert(wanted.end(), expected.begin() + static_cast<std::ptrdiff_t>(i * hidden),
                          expected.begin() + static_cast<std::ptrdiff_t>((i + 1) * hidden));
        }
        const std::size_t tokens = rows.size() / hidden;
        const std::vector<std::int64_t> ones(tokens, 1);
        check_rows(compute(rows.data(), ones.data(), 1, tokens, alone), wanted, what, target, hidden);
    }
}

void check_attention(const Target& target, std::size_t hidden, std::size_t heads, const Batch& batch,
                     Coding coding, bool integers, bool centred, Random& random) {
    const Matrix qkv(hidden, 3 * hidden, coding, random), out(hidden, hidden, coding, random);
    const auto gamma = random.floats(hidden, 0.5f, 1.5f), beta = random.floats(hidden, -1.0f, 1.0f);
    AttentionShape shape{};
    shape.hidden = hidden, shape.heads = heads, shape.epsilon = 1e-12f, shape.integers = integers;
    shape.scaling = 0.125f;
    shape.x = {0.02f, 128, 1, 255};
    const int z = centred ? 128 : 77;
    shape.q = {0.03f, z, 0, 255}, shape.k = {0.05f, z, 0, 255}, shape.v = {0.04f, z, 0, 255};
    shape.p = {1.0f / 255.0f, centred ? 0 : 3, 0, 255}, shape.o = {0.01f, centred ? 128 : 9, 0, 255};
    shape.q_scaled = shape.q.scale * shape.scaling;
    shape.qkv = qkv.weight(), shape.out = out.weight();
    shape.gamma = gamma.data(), shape.beta = beta.data();
    const auto x = random.floats(batch.batch * batch.tokens * hidden, -3.0f, 3.0f);
    std::vector<float> expected(x.size());
    reference_attention(shape, x.data(), batch.mask.data(), batch.batch, batch.tokens, expected.data());
    const AttentionBlock block(shape, target);
    check_block([&](const float* from, const std::int64_t* mask, std::size_t sequences, std::size_t tokens,
                    Pool& pool, float* y) { block.run(from, mask, sequences, tokens, pool, y); },
                batch, hidden, x, expected, integers ? "attention on codes" : "attention on floats", target);
}

void check_feed_forward(const Target& target, std::size_t hidden, std::size_t middle, const Batch& batch,
                        Coding coding, Random& random) {
    const Matrix up(hidden, middle, coding, random), down(middle, hidden, coding, random);
    const auto gamma = random.floats(hidden, 0.5f, 1.5f), beta = random.floats(hidden, -1.0f, 1.0f);
    FeedForwardShape shape{};
    shape.hidden = hidden, shape.middle = middle, shape.epsilon = 1e-12f;
    shape.x = {0.02f, 128, 0, 255}, shape.m = {0.01f, 10, 0, 255};
    shape.up = up.weight(), shape.down = down.weight();
    shape.gamma = gamma.data(), shape.beta = beta.data();
    const auto x = random.floats(batch.batch * batch.tokens * hidden, -3.0f, 3.0f);
    std::vector<float> expected(x.size());
    reference_feed_forward(shape, x.data(), batch.mask.data(), batch.batch, batch.tokens, expected.data());
    const FeedForwardBlock block(shape, target);
    check_block([&](const float* from, const std::int64_t* mask, std::size_t sequences, std::size_t tokens,
                    Pool& pool, float* y) { block.run(from, mask, sequences, tokens, pool, y); },
                batch, hidden, x, expected, "feed forward", target);
}

void check_linear(const Target& target, std::size_t rows, std::size_t in, std::size_t out, Random& random) {
    const Matrix w(in, out, {4, 1, -8}, random);
    const LinearShape shape{{0.02f, 128, 121, 135}, w.weight()};
    const LowBitLinear linear(shape, target);
    const auto x = random.floats(rows * in, -0.3f, 0.3f);
    std::vector<float> expected(rows * out), y(rows * out, 99.0f), shared(rows * out, 99.0f);
    reference_linear(shape.weight, shape.x, x.data(), rows, expected.data());
    OneThread alone;
    ThreadPool several(3);
    linear.run(x.data(), rows, alone, y.data());
    linear.run(x.data(), rows, several, shared.data());
    check_rows(y, expected, "linear", target, out);
    check_rows(shared, expected, "linear, several threads", target, out);
}

}  // namespace

int main() {
    Random random;
    const Coding codings[] = {{2, 1, -1}, {2, 2, -3}, {4, 1, -8}, {8, 1, -128}};
    for (const Target* each : runnable_targets()) {
        const Target& target = *each;
        int round = 0;
        for (const auto& [hidden, heads] :
             {std::pair<std::size_t, std::size_t>{64, 2}, {48, 4}, {30, 5}, {33, 1}, {8, 8}, {160, 2}}) {
            for (int holes = 0; holes < 4; ++holes) {
                const Batch some = batch_of(3, holes == 0 ? 17 : 33, holes, random);
                const Coding coding = codings[round++ % 4];
                check_attention(target, hidden, heads, some, coding, true, true, random);
                check_attention(target, hidden, heads, some, coding, true, false, random);
                check_attention(target, hidden, heads, some, coding, false, true, random);
                check_feed_forward(target, hidden, holes % 2 == 0 ? 130 : 96, some, coding, random);
            }
        }
        const Batch large = batch_of(7, 150, 1, random), single = batch_of(1, 1, 0, random);
        check_attention(target, 32, 2, large, codings[2], true, true, random);
        check_feed_forward(target, 32, 48, large, codings[0], random);
        check_attention(target, 32, 2, single, codings[2], true, true, random);
        const Batch one = batch_of(1, 150, 0, random);  // its rows are cut among two threads and three
        check_attention(target, 32, 2, one, codings[0], true, true, random);
        check_attention(target, 32, 2, one, codings[3], false, true, random);
        check_feed_forward(target, 32, 48, one, codings[1], random);
        check_attention(target, 32, 2, batch_of(0, 5, 0, random), codings[2], true, true, random);
        check_feed_forward(target, 32, 48, batch_of(5, 0, 0, random), codings[2], random);
        for (const std::size_t rows : {0, 1, 2, 40, 300}) check_linear(target, rows, 70, 35, random);
        std::printf("%s: passed\n", target.name());
    }
    std::puts("blocks: all C++ tests passed");
    return 0;
}
