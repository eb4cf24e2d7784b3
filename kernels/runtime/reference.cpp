// The contract is in reference.h.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mrem::runtime {
namespace {

using Codes = std::vector<std::uint8_t>;

Codes codes_of(const float* x, std::size_t n, const Grid& grid) {
    Codes codes(n);
    kScalarFloats.quantize(x, n, grid, codes.data());
    return codes;
}

// Σ (a − zero of a) · (b − zero of b) over n codes with the given distances.
std::int32_t dot(const std::uint8_t* a, int a_zero, const std::uint8_t* b, std::size_t b_step, int b_zero,
                 std::size_t n) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += (a[i] - a_zero) * (b[i * b_step] - b_zero);
    return static_cast<std::int32_t>(sum);
}

// One head of one example on codes: context[t] for columns of the head, `width` of them.
void head_on_codes(const AttentionShape& shape, const float* qkv, std::size_t tokens, std::size_t head,
                   float* context) {
    const std::size_t hidden = shape.hidden, width = hidden / shape.heads;
    Codes q, k, v;
    for (std::size_t t = 0; t < tokens; ++t) {
        const float* row = qkv + t * 3 * hidden + head * width;
        const Codes parts[] = {codes_of(row, width, shape.q), codes_of(row + hidden, width, shape.k),
                               codes_of(row + 2 * hidden, width, shape.v)};
        q.insert(q.end(), parts[0].begin(), parts[0].end());
        k.insert(k.end(), parts[1].begin(), parts[1].end());
        v.insert(v.end(), parts[2].begin(), parts[2].end());
    }
    const float score_scale = shape.q_scaled * shape.k.scale, value_scale = shape.p.scale * shape.v.scale;
    const std::vector<std::int32_t> zeros(tokens);
    std::vector<std::int32_t> scores(tokens);
    std::vector<float> work(tokens);
    Codes p(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t u = 0; u < tokens; ++u) {
            scores[u] = dot(q.data() + t * width, shape.q.zero_point, k.data() + u * width, 1,
                            shape.k.zero_point, width);
        }
        kScalarFloats.softmax_quantize({scores.data(), 1, tokens, tokens, zeros.data(), score_scale}, shape.p,
                                       work.data(), p.data(), tokens);
        for (std::size_t c = 0; c < width; ++c) {
            const std::int32_t sum =
                dot(p.data(), shape.p.zero_point, v.data() + c, width, shape.v.zero_point, tokens);
            context[t * hidden + head * width + c] = static_cast<float>(sum) * value_scale;
        }
    }
}

// The same on floats; sums in the order of the inputs, one fma each, as in attention.h.
void head_on_floats(const AttentionShape& shape, const float* qkv, std::size_t tokens, std::size_t head,
                    float* context) {
    const std::size_t hidden = shape.hidden, width = hidden / shape.heads;
    std::vector<float> scores(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t u = 0; u < tokens; ++u) {
            const float* q = qkv + t * 3 * hidden + head * width;
            const float* k = qkv + u * 3 * hidden + hidden + head * width;
            float sum = 0.0f;
            for (std::size_t c = 0; c < width; ++c) sum = std::fma(q[c], k[c], sum);
            scores[u] = sum * shape.scaling;
        }
        kScalarFloats.softmax(scores.data(), tokens);
        for (std::size_t c = 0; c < width; ++c) {
            float sum = 0.0f;
            for (std::size_t u = 0; u < tokens; ++u) {
                sum = std::fma(scores[u], qkv[u * 3 * hidden + 2 * hidden + head * width + c], sum);
            }
            context[t * hidden + head * width + c] = sum;
        }
    }
}

// body(rows, n, results) for each example with its real tokens side by side; the others' results are 0.
template <class Body>
void by_example(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens,
                std::size_t width, float* y, const Body& body) {
    for (std::size_t b = 0; b < batch; ++b) {
        std::vector<std::size_t> real;
        for (std::size_t i = b * tokens; i < (b + 1) * tokens; ++i) {
            if (mask[i] != 0) real.push_back(i);
        }
        std::vector<float> rows(real.size() * width), results(real.size() * width);
        for (std::size_t t = 0; t < real.size(); ++t) {
            std::copy_n(hidden + real[t] * width, width, rows.data() + t * width);
        }
        body(rows.data(), real.size(), results.data());
        std::fill_n(y + b * tokens * width, tokens * width, 0.0f);
        for (std::size_t t = 0; t < real.size(); ++t) {
            std::copy_n(results.data() + t * width, width, y + real[t] * width);
        }
    }
}

}  // namespace

int reference_value(const Weight& weight, std::size_t input, std::size_t output) {
    const Place place = place_of(input, output, weight.in, weight.bits);
    return weight.spacing * (weight.codes[place.byte] >> place.shift & ((1 << weight.bits) - 1)) + weight.low;
}

namespace {

void linear_on_codes(const Weight& weight, const Grid& x_grid, const Codes& codes, std::size_t rows,
                     float* y) {
    std::vector<int> column(weight.in);
    for (std::size_t j = 0; j < weight.out; ++j) {
        for (std::size_t i = 0; i < weight.in; ++i) column[i] = reference_value(weight, i, j);
        const float scale = x_grid.scale * weight.scale[j];
        for (std::size_t r = 0; r < rows; ++r) {
            std::int64_t sum = 0;
            for (std::size_t i = 0; i < weight.in; ++i) {
                sum += (codes[r * weight.in + i] - x_grid.zero_point) * column[i];
            }
            y[r * weight.out + j] =
                static_cast<float>(static_cast<std::int32_t>(sum)) * scale + weight.bias[j];
        }
    }
}

}  // namespace

void reference_linear(const Weight& weight, const Grid& x_grid, const float* x, std::size_t rows, float* y) {
    linear_on_codes(weight, x_grid, codes_of(x, rows * weight.in, x_grid), rows, y);
}

void reference_attention(const AttentionShape& shape, const float* hidden, const std::int64_t* mask,
                         std::size_t batch, std::size_t tokens, float* y) {
    const std::size_t width = shape.hidden;
    by_example(hidden, mask, batch, tokens, width, y, [&](const float* rows, std::size_t n, float* results) {
        std::vector<float> qkv(n * 3 * width), context(n * width), sums(n * width);
        reference_linear(shape.qkv, shape.x, rows, n, qkv.data());
        for (std::size_t head = 0; head < shape.heads; ++head) {
            if (shape.integers) {
                head_on_codes(shape, qkv.data(), n, head, context.data());
            } else {
                head_on_floats(shape, qkv.data(), n, head, context.data());
            }
        }
        reference_linear(shape.out, shape.o, context.data(), n, sums.data());
        for (std::size_t t = 0; t < n; ++t) {
            layer_norm(kScalarFloats, sums.data() + t * width, rows + t * width, width, shape.gamma,
                       shape.beta, shape.epsilon, results + t * width);
        }
    });
}

void reference_feed_forward(const FeedForwardShape& shape, const float* hidden, const std::int64_t* mask,
                            std::size_t batch, std::size_t tokens, float* y) {
    const std::size_t width = shape.hidden;
    by_example(hidden, mask, batch, tokens, width, y, [&](const float* rows, std::size_t n, float* results) {
        std::vector<float> middle(n * shape.middle), sums(n * width);
        reference_linear(shape.up, shape.x, rows, n, middle.data());
        Codes codes(middle.size());
        kScalarFloats.gelu_quantize(middle.data(), middle.size(), shape.m, codes.data());
        linear_on_codes(shape.down, shape.m, codes, n, sums.data());
        for (std::size_t t = 0; t < n; ++t) {
            layer_norm(kScalarFloats, sums.data() + t * width, rows + t * width, width, shape.gamma,
                       shape.beta, shape.epsilon, results + t * width);
        }
    });
}

}  // namespace mrem::runtime
