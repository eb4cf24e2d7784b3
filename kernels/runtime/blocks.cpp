// The contract is in blocks.h.
#include "blocks.h"

#include "active.h"
#include "reference.h"

namespace mrem::runtime {

const FloatKernels& active_floats() { return kScalarFloats; }
const char* active_target() { return "scalar"; }

void AttentionBlock::run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens,
                         Pool& pool, float* y) const {
    const std::size_t size = tokens * shape_.hidden;
    pool.parallel_for(batch, [&](std::size_t b) {
        reference_attention(shape_, hidden + b * size, mask + b * tokens, 1, tokens, y + b * size);
    });
}

void FeedForwardBlock::run(const float* hidden, const std::int64_t* mask, std::size_t batch,
                           std::size_t tokens, Pool& pool, float* y) const {
    const std::size_t size = tokens * shape_.hidden;
    pool.parallel_for(batch, [&](std::size_t b) {
        reference_feed_forward(shape_, hidden + b * size, mask + b * tokens, 1, tokens, y + b * size);
    });
}

void LowBitLinear::run(const float* x, std::size_t rows, Pool& pool, float* y) const {
    pool.parallel_for(rows, [&](std::size_t row) {
        reference_linear(shape_.weight, shape_.x, x + row * shape_.weight.in, 1, y + row * shape_.weight.out);
    });
}

}  // namespace mrem::runtime
