// What the operators compute, written as plainly as possible: the truth for the tests. Same inputs and
// rounding as the classes in blocks.h; integer sums are exact in both, and floats use the portable kernels.
#pragma once

#include "blocks.h"

namespace mrem::runtime {

// The value of weight[input, output] as an integer.
int reference_value(const Weight& weight, std::size_t input, std::size_t output);

void reference_linear(const Weight& weight, const Grid& x_grid, const float* x, std::size_t rows, float* y);

void reference_attention(const AttentionShape& shape, const float* hidden, const std::int64_t* mask,
                         std::size_t batch, std::size_t tokens, float* y);

void reference_feed_forward(const FeedForwardShape& shape, const float* hidden, const std::int64_t* mask,
                            std::size_t batch, std::size_t tokens, float* y);

}  // namespace mrem::runtime
