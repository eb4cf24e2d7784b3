// The contract is in blocks.h.
#include "attention.h"
#include "block_parts.h"

namespace mrem::runtime {

AttentionBlock::AttentionBlock(const AttentionShape& shape, const Target& target)
    : target_(target), shape_(shape), qkv_(target, shape.qkv, shape.x), out_(target, shape.out, shape.o) {}

void AttentionBlock::run(const float* hidden, const std::int64_t* mask, std::size_t batch, std::size_t tokens,
                         Pool& pool, float* y) const {
    const Tokens real(mask, batch, tokens);
    clear_padding(mask, batch * tokens, shape_.hidden, y);
    const std::vector<Span> spans = spans_of(real);
    for_spans(pool, spans.size(),
              [&](std::size_t span, Pool& inner) { run_span(hidden, real, spans[span], inner, y); });
}

void AttentionBlock::run_span(const float* hidden, const Tokens& tokens, Span span, Pool& pool,
                              float* y) const {
    const FloatKernels& floats = *target_.floats;
    const std::size_t* offsets = tokens.offsets.data() + span.first;
    const std::size_t sequences = span.last - span.first, rows = offsets[sequences] - offsets[0];
    const std::uint32_t* index = tokens.index.data() + offsets[0];
    const std::size_t width = shape_.hidden, padded = round_up(width, kPanel), three = 3 * width;
    // Tiles read a few bytes beyond the last code of q, and multiply them by zeros.
    const std::size_t qkv_stride = shape_.integers ? stride_of(three) : round_up(three, kPanel);
    Lease lease;
    Arrays arrays;
    const auto x_slot = arrays.add<std::uint8_t>(rows * stride_of(width));
    const auto codes_slot = arrays.add<std::uint8_t>(shape_.integers ? rows * qkv_stride + kReadBeyond : 0);
    const auto qkv_slot = arrays.add<float>(shape_.integers ? 0 : rows * qkv_stride);
    const auto sum_slot = arrays.add<float>(rows * padded);
    arrays.place(*lease);
    const CodeRows x{arrays.at(x_slot), rows, width, stride_of(width)};
    std::uint8_t* codes = arrays.at(codes_slot);
    float *qkv = arrays.at(qkv_slot), *sum = arrays.at(sum_slot);

    const auto part_of = [&](std::size_t first, std::size_t last) {
        return CodeRows{x.codes + first * x.stride, last - first, width, x.stride};
    };
    by_spans(pool, rows, [&](std::size_t begin, std::size_t end, Pool& inner) {
        by_rows(inner, end - begin, [&](std::size_t first, std::size_t last) {
            quantize_rows(floats, hidden, index, begin + first, begin + last, shape_.x, x);
        });
        if (shape_.integers) {
            const Grid grids[3] = {shape_.q, shape_.k, shape_.v};
            CodeSink sink(floats, grids, width, false, codes + begin * qkv_stride, qkv_stride);
            multiply(target_, qkv_, part_of(begin, end), inner, sink);
        } else {
            FloatSink sink(qkv + begin * qkv_stride, qkv_stride, true);
            multiply(target_, qkv_, part_of(begin, end), inner, sink);
        }
    });

    const std::size_t heads = shape_.heads, head = width / heads;
    const CodeRows& context = x;  // its codes are no longer needed
    share(pool, sequences * heads, [&](std::size_t task) {
        const std::size_t s = task / heads, first = offsets[s] - offsets[0], column = task % heads * head;
        const std::size_t count = offsets[s + 1] - offsets[s];
        std::uint8_t* to = context.codes + first * context.stride + column;
        if (shape_.integers) {
            const std::uint8_t* q = codes + first * qkv_stride + column;
            attend(target_, shape_,
                   {q, q + width, q + 2 * width, qkv_stride, count, head, to, context.stride});
        } else {
            const float* q = qkv + first * qkv_stride + column;
            attend(target_, shape_,
                   {q, q + width, q + 2 * width, qkv_stride, count, head, to, context.stride});
        }
    });
    by_spans(pool, rows, [&](std::size_t begin, std::size_t end, Pool& inner) {
        FloatSink sums(sum + begin * padded, padded, true);
        multiply(target_, out_, part_of(begin, end), inner, sums);
        by_rows(inner, end - begin, [&](std::size_t first, std::size_t last) {
            norm_rows(floats, sum, padded, hidden, index, begin + first, begin + last, width,
                      {shape_.gamma, shape_.beta, shape_.epsilon}, y);
        });
    });
}

}  // namespace mrem::runtime
