// What the blocks share, and the single linear layer; contracts are in blocks.h and block_parts.h.
#include "blocks.h"

#include <algorithm>
#include <cstring>

#include "block_parts.h"

namespace mrem::runtime {

Tokens::Tokens(const std::int64_t* mask, std::size_t batch, std::size_t tokens) : offsets{0} {
    index.reserve(batch * tokens);
    for (std::size_t s = 0; s < batch; ++s) {
        for (std::size_t i = s * tokens; i < (s + 1) * tokens; ++i) {
            if (mask[i] != 0) index.push_back(static_cast<std::uint32_t>(i));
        }
        if (index.size() > offsets.back()) offsets.push_back(index.size());
    }
}

std::vector<Span> spans_of(const Tokens& tokens) {
    const std::size_t rows = tokens.index.size();
    const std::size_t count = std::max<std::size_t>(1, (rows + kSpanRows / 2) / kSpanRows);
    std::vector<Span> spans;
    std::size_t first = 0;
    for (std::size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
        if (tokens.offsets[s + 1] * count < rows * (spans.size() + 1)) continue;
        spans.push_back({first, s + 1});
        first = s + 1;
    }
    return spans;
}

std::size_t spans_of_rows(std::size_t rows, std::size_t threads) {
    const std::size_t spans = ceil_div(rows, kSpanRows), shared = round_up(spans, threads);
    return rows >= kPartRows * shared ? shared : spans;
}

bool worth_sharing_whole(std::size_t tasks, std::size_t threads) {
    return threads > 1 && (tasks % threads == 0 || tasks >= 4 * threads);
}

void clear_padding(const std::int64_t* mask, std::size_t rows, std::size_t width, float* y) {
    for (std::size_t row = 0; row < rows; ++row) {
        if (mask[row] == 0) std::memset(y + row * width, 0, width * sizeof(float));
    }
}

void norm_rows(const FloatKernels& floats, const float* sums, std::size_t stride, const float* hidden,
               const std::uint32_t* index, std::size_t first, std::size_t last, std::size_t width,
               const NormOf& norm, float* y) {
    constexpr std::size_t kRows = 8;
    for (std::size_t row = first; row < last; row += kRows) {
        const std::size_t count = std::min(kRows, last - row);
        const float *from[kRows], *added[kRows];
        float* to[kRows];
        for (std::size_t i = 0; i < count; ++i) {
            from[i] = sums + (row + i) * stride;
            added[i] = hidden + index[row + i] * width;
            to[i] = y + index[row + i] * width;
        }
        floats.layer_norm(count, from, added, width, norm.gamma, norm.beta, norm.epsilon, to);
    }
}

LowBitLinear::LowBitLinear(const LinearShape& shape, const Target& target)
    : target_(target), x_(shape.x), weight_(target, shape.weight, shape.x) {}

void LowBitLinear::run(const float* x, std::size_t rows, Pool& pool, float* y) const {
    const std::size_t stride = stride_of(weight_.inputs());
    by_spans(pool, rows, [&](std::size_t first, std::size_t last, Pool& inner) {
        Lease lease;
        Arrays arrays;
        const auto codes_slot = arrays.add<std::uint8_t>((last - first) * stride);
        arrays.place(*lease);
        const CodeRows codes{arrays.at(codes_slot), last - first, weight_.inputs(), stride};
        quantize_rows(*target_.floats, x + first * codes.width, nullptr, 0, codes.rows, x_, codes);
        FloatSink sink(y + first * weight_.outputs(), weight_.outputs(), false);
        multiply(target_, weight_, codes, inner, sink);
    });
}

}  // namespace mrem::runtime
