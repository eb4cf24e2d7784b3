// softmax(q·kᵀ)·v for one head of one sequence.
#pragma once

#include "blocks.h"

namespace mrem::runtime {

// Tiles read rows of codes up to the next 64 bytes, or whole quads if a head is narrower.
constexpr std::size_t kReadBeyond = 128;

// Rows of `stride` elements, `width` of which belong to this head; the result as codes of grid `o`.
template <class T>
struct Head {
    const T *q, *k, *v;
    std::size_t stride, tokens, width;
    std::uint8_t* context;
    std::size_t context_stride;
};

// On codes: scores = float(Σ (q − zq)(k − zk)) · (q_scaled · k_scale), their softmax quantized, times v.
void attend(const Target& target, const AttentionShape& shape, const Head<std::uint8_t>& head);

// On floats, with probabilities as they come. Every sum runs in the order of its inputs, one fma each.
void attend(const Target& target, const AttentionShape& shape, const Head<float>& head);

}  // namespace mrem::runtime
