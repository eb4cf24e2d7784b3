// What the operators compute, without a word about onnxruntime: operators/ checks, these calculate.
//
// All of them may be called from several threads at once. Pointers in the shapes belong to the session and
// outlive the objects. `run` may throw std::bad_alloc. Code bytes are arbitrary: nothing is read or written
// out of bounds whatever they are.
//
// Every row of y has the same bits whatever else is in the batch, behind whatever padding, and however many
// threads there are: sums of integers are exact, and sums of floats run over one row in a fixed order.
#pragma once

#include <vector>

#include "pool.h"
#include "weights.h"

namespace mrem::runtime {

struct AttentionShape {
    std::size_t hidden, heads;  // heads divides hidden
    float scaling;              // of the scores on floats
    float q_scaled;             // the scale of q times `scaling`, for the scores on codes
    float epsilon;
    bool integers;  // q·kᵀ and p·v on codes; else on floats, and q, k, p and v have no codes
    Grid x, q, k, p, v, o;
    Weight qkv, out;
    const float *gamma, *beta;
};

struct FeedForwardShape {
    std::size_t hidden, middle;
    float epsilon;
    Grid x, m;
    Weight up, down;
    const float *gamma, *beta;
};

struct LinearShape {
    Grid x;
    Weight weight;
};

// Rows of real tokens, sequence after sequence: row i is row index[i] of the tensors outside, and sequence s
// has the rows [offsets[s], offsets[s + 1]). Sequences without tokens are left out.
struct Tokens {
    std::vector<std::uint32_t> index;
    std::vector<std::size_t> offsets;

    Tokens(const std::int64_t* mask, std::size_t batch, std::size_t tokens);
};

// A part of them that one task computes: sequences [first, last).
struct Span {
    std::size_t first, last;
};

// y = LayerNorm(out(attention(quantized hidden)) + hidden) over the tokens whose mask is not 0; 0 elsewhere.
class AttentionBlock {
  public:
    explicit AttentionBlock(const AttentionShape& shape, const Target& target = current_target());
    void run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens, Pool& pool,
             float* y) const;

  private:
    void run_span(const float* hidden, const Tokens& tokens, Span span, Pool& pool, float* y) const;

    const Target& target_;
    AttentionShape shape_;
    Weights qkv_, out_;
};

// y = LayerNorm(down(gelu(up(hidden))) + hidden), inputs of both matrices quantized; 0 where the mask is 0.
class FeedForwardBlock {
  public:
    explicit FeedForwardBlock(const FeedForwardShape& shape, const Target& target = current_target());
    void run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens, Pool& pool,
             float* y) const;

  private:
    void run_rows(const float* hidden, const std::uint32_t* index, std::size_t rows, Pool& pool,
                  float* y) const;

    const Target& target_;
    FeedForwardShape shape_;
    Weights up_, down_;
};

// y = quantized x · weight
class LowBitLinear {
  public:
    explicit LowBitLinear(const LinearShape& shape, const Target& target = current_target());
    void run(const float* x, std::size_t rows, Pool& pool, float* y) const;

  private:
    const Target& target_;
    Grid x_;
    Weights weight_;
};

}  // namespace mrem::runtime
