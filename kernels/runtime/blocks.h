// What the operators compute, without a word about onnxruntime: operators/ checks, these calculate.
//
// All of them may be called from several threads at once. Pointers in the shapes belong to the session and
// outlive the objects. `run` may throw std::bad_alloc. Code bytes are arbitrary: nothing may be read or
// written out of bounds whatever they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float_kernels.h"
#include "layout.h"
#include "pool.h"

namespace mrem::runtime {

// A matrix of codes in panels (layout.h). Its shape and grid are checked: 1 <= in <= kMostInputs.
struct Weight {
    const std::uint8_t* codes;  // packed_bytes(in, out, bits)
    const float* scale;         // of each output
    const float* bias;          // of each output
    std::size_t in, out;
    int bits, spacing, low;  // value = spacing · code + low
};

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

// y = LayerNorm(out(attention(quantized hidden)) + hidden) over the tokens whose mask is not 0; 0 elsewhere.
class AttentionBlock {
  public:
    explicit AttentionBlock(const AttentionShape& shape) : shape_(shape) {}
    void run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens, Pool& pool,
             float* y) const;

  private:
    AttentionShape shape_;
};

// y = LayerNorm(down(gelu(up(hidden))) + hidden), inputs of both matrices quantized; 0 where the mask is 0.
class FeedForwardBlock {
  public:
    explicit FeedForwardBlock(const FeedForwardShape& shape) : shape_(shape) {}
    void run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens, Pool& pool,
             float* y) const;

  private:
    FeedForwardShape shape_;
};

// y = quantized x · weight
class LowBitLinear {
  public:
    explicit LowBitLinear(const LinearShape& shape) : shape_(shape) {}
    void run(const float* x, std::size_t rows, Pool& pool, float* y) const;

  private:
    LinearShape shape_;
};

}  // namespace mrem::runtime
