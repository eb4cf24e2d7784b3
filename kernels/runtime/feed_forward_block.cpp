// The contract is in blocks.h.
#include <algorithm>

#include "block_parts.h"

namespace mrem::runtime {

FeedForwardBlock::FeedForwardBlock(const FeedForwardShape& shape, const Target& target)
    : target_(target), shape_(shape), up_(target, shape.up, shape.x), down_(target, shape.down, shape.m) {}

void FeedForwardBlock::run(const float* hidden, const std::int64_t* mask, std::size_t batch,
                           std::size_t tokens, Pool& pool, float* y) const {
    const Tokens real(mask, batch, tokens);
    clear_padding(mask, batch * tokens, shape_.hidden, y);
    by_spans(pool, real.index.size(), [&](std::size_t first, std::size_t last, Pool& inner) {
        run_rows(hidden, real.index.data() + first, last - first, inner, y);
    });
}

void FeedForwardBlock::run_rows(const float* hidden, const std::uint32_t* index, std::size_t rows, Pool& pool,
                                float* y) const {
    const std::size_t width = shape_.hidden, middle = shape_.middle, padded = round_up(width, kPanel);
    const FloatKernels& floats = *target_.floats;
    Lease lease;
    Arrays arrays;
    const auto x_slot = arrays.add<std::uint8_t>(rows * stride_of(width));
    const auto m_slot = arrays.add<std::uint8_t>(rows * stride_of(middle));
    const auto sum_slot = arrays.add<float>(rows * padded);
    arrays.place(*lease);
    const CodeRows x{arrays.at(x_slot), rows, width, stride_of(width)};
    const CodeRows m{arrays.at(m_slot), rows, middle, stride_of(middle)};
    float* sum = arrays.at(sum_slot);

    by_rows(pool, rows, [&](std::size_t first, std::size_t last) {
        quantize_rows(floats, hidden, index, first, last, shape_.x, x);
        clear_ends(m, first, last);
    });
    CodeSink codes(floats, &shape_.m, middle, true, m.codes, m.stride);
    multiply(target_, up_, x, pool, codes);
    FloatSink sums(sum, padded, true);
    multiply(target_, down_, m, pool, sums);
    by_rows(pool, rows, [&](std::size_t first, std::size_t last) {
        norm_rows(floats, sum, padded, hidden, index, first, last, width,
                  {shape_.gamma, shape_.beta, shape_.epsilon}, y);
    });
}

}  // namespace mrem::runtime
