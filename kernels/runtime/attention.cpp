// The contract is in attention.h.
//
// Rows of queries are taken a tile at a time: their scores, probabilities and context stay in the first
// cache.
#include "attention.h"

#include <algorithm>
#include <cstring>

#include "byte_sums.h"
#include "gemm.h"

namespace mrem::runtime {
namespace {

// (128 − zero) Σ codes of every row: what is missing where an operand around `zero` was shifted by 128.
void shifts_of(const std::uint8_t* codes, std::size_t stride, std::size_t rows, std::size_t width,
               std::int32_t zero, std::int32_t* shifts) {
    for (std::size_t row = 0; row < rows; ++row) {
        shifts[row] = zero == 128 ? 0 : (128 - zero) * sum_of_bytes(codes + row * stride, width);
    }
}

// The tiles of `rows` rows by all panels.
void tiles(const GemmKernels& kernels, std::size_t rows, std::size_t count, Tile tile) {
    const std::size_t most = tile.wide != nullptr ? kernels.wide_panels : kernels.panels;
    for (std::size_t panel = 0; panel < count; panel += most) {
        kernels.tile(rows, std::min(most, count - panel), tile);
        tile.b += most * tile.b_stride;
        if (tile.wide != nullptr) tile.wide += most * tile.b_stride;
        tile.sums += most * kPanel;
    }
}

std::size_t quads_of(const GemmKernels& kernels, std::size_t inputs) {
    const std::size_t quads = ceil_div(inputs, kQuad);
    return quads > kernels.quads ? round_up(quads, kernels.quads) : quads;
}

}  // namespace

void attend(const Target& target, const AttentionShape& shape, const Head<std::uint8_t>& head) {
    const GemmKernels& kernels = *target.gemm;
    const FloatKernels& floats = *target.floats;
    const std::size_t tokens = head.tokens, width = head.width, rows = kernels.rows;
    const std::size_t key_panels = panels(tokens), key_quads = quads_of(kernels, width);
    const std::size_t value_panels = panels(width), value_quads = quads_of(kernels, tokens);
    const std::size_t scores_stride = key_panels * kPanel, context_stride = value_panels * kPanel;
    const std::size_t p_stride = stride_of(value_quads * kQuad);
    const std::int32_t zq = shape.q.zero_point, zv = shape.v.zero_point;

    Lease lease;
    Arrays arrays;
    const auto keys_slot = arrays.add<std::int8_t>(key_panels * key_quads * kStepBytes);
    const auto values_slot = arrays.add<std::int8_t>(value_panels * value_quads * kStepBytes);
    const bool wide = kernels.widen != nullptr;
    const auto wide_keys_slot = arrays.add<std::int16_t>(wide ? key_panels * key_quads * kStepBytes : 0);
    const auto wide_values_slot =
        arrays.add<std::int16_t>(wide ? value_panels * value_quads * kStepBytes : 0);
    const auto offsets_slot = arrays.add<std::int32_t>(scores_stride);
    const auto scores_slot = arrays.add<std::int32_t>(rows * scores_stride);
    const auto work_slot = arrays.add<float>(rows * scores_stride);
    const auto p_slot = arrays.add<std::uint8_t>(rows * p_stride);
    const auto sums_slot = arrays.add<std::int32_t>(rows * context_stride);
    const auto columns_slot = arrays.add<Columns>(value_panels);
    arrays.place(*lease);
    std::int8_t *keys = arrays.at(keys_slot), *values = arrays.at(values_slot);
    std::int32_t *offsets = arrays.at(offsets_slot), *scores = arrays.at(scores_slot);
    std::int32_t* sums = arrays.at(sums_slot);
    std::uint8_t* p = arrays.at(p_slot);
    Columns* columns = arrays.at(columns_slot);

    // Operands are bytes around 0, k' = k − 128: Σ (q − zq)(k − zk) = Σ q·k' − zq Σ k' + what is the same for
    // all keys and makes no difference to the softmax.
    kernels.pack_keys(head.k, head.stride, tokens, width, key_quads, keys, offsets);
    for (std::size_t i = 0; i < tokens; ++i) offsets[i] *= zq;
    kernels.pack_values(head.v, head.stride, tokens, width, value_quads, values);
    std::int16_t *wide_keys = nullptr, *wide_values = nullptr;
    if (wide) {
        kernels.widen(keys, key_panels * key_quads, wide_keys = arrays.at(wide_keys_slot));
        kernels.widen(values, value_panels * value_quads, wide_values = arrays.at(wide_values_slot));
    }
    const float score_scale = shape.q_scaled * shape.k.scale, context_scale = shape.p.scale * shape.v.scale;
    for (std::size_t c = 0; c < context_stride; ++c) {
        Columns& by = columns[c / kPanel];
        std::int32_t sum = 0;
        if (shape.p.zero_point != 0 && c < width) {
            for (std::size_t i = 0; i < tokens; ++i) sum += head.v[i * head.stride + c] - zv;
        }
        by.offset[c % kPanel] = shape.p.zero_point * sum;
        by.scale[c % kPanel] = context_scale;
        by.bias[c % kPanel] = 0.0f;
    }

    by_tiles(tokens, rows, [&](std::size_t first, std::size_t height) {
        const std::uint8_t* q = head.q + first * head.stride;
        tiles(kernels, height, key_panels,
              {q, head.stride, keys, key_quads * kStepBytes, key_quads, scores, scores_stride, false, nullptr,
               wide_keys});
        floats.softmax_quantize({scores, height, tokens, scores_stride, offsets, score_scale}, shape.p,
                                arrays.at(work_slot), p, p_stride);
        for (std::size_t row = 0; row < height; ++row) {
            std::memset(p + row * p_stride + tokens, 0, p_stride - tokens);
        }
        tiles(kernels, height, value_panels,
              {p, p_stride, values, value_quads * kStepBytes, value_quads, sums, context_stride, false,
               nullptr, wide_values});
        std::int32_t shifts[kMostTileRows];
        shifts_of(p, p_stride, height, tokens, zv, shifts);
        floats.quantize_sums({sums, height, width, context_stride, columns, shifts}, shape.o, false,
                             head.context + first * head.context_stride, head.context_stride);
    });
}

void attend(const Target& target, const AttentionShape& shape, const Head<float>& head) {
    const GemmKernels& kernels = *target.gemm;
    const FloatKernels& floats = *target.floats;
    constexpr std::size_t kRows = 8;
    const std::size_t tokens = head.tokens, width = head.width;
    const std::size_t keys_stride = round_up(tokens, kPanel), values_stride = round_up(width, kPanel);
    Lease lease;
    Arrays arrays;
    const auto keys_slot = arrays.add<float>(width * keys_stride);
    const auto values_slot = arrays.add<float>(tokens * values_stride);
    const auto scores_slot = arrays.add<float>(kRows * keys_stride);
    const auto context_slot = arrays.add<float>(kRows * values_stride);
    arrays.place(*lease);
    float *keys = arrays.at(keys_slot), *values = arrays.at(values_slot);
    float *scores = arrays.at(scores_slot), *context = arrays.at(context_slot);
    for (std::size_t c = 0; c < width; ++c) {
        for (std::size_t i = 0; i < keys_stride; ++i) {
            keys[c * keys_stride + i] = i < tokens ? head.k[i * head.stride + c] : 0.0f;
        }
    }
    for (std::size_t i = 0; i < tokens; ++i) {
        float* to = values + i * values_stride;
        std::memcpy(to, head.v + i * head.stride, width * sizeof(float));
        for (std::size_t c = width; c < values_stride; ++c) to[c] = 0.0f;
    }
    for (std::size_t first = 0; first < tokens; first += kRows) {
        const std::size_t height = std::min(kRows, tokens - first);
        kernels.float_product(height, keys_stride, width, head.q + first * head.stride, head.stride, keys,
                              scores);
        for (std::size_t row = 0; row < height; ++row) {
            float* of_row = scores + row * keys_stride;
            for (std::size_t i = 0; i < tokens; ++i) of_row[i] *= shape.scaling;
            floats.softmax(of_row, tokens);
        }
        kernels.float_product(height, values_stride, tokens, scores, keys_stride, values, context);
        for (std::size_t row = 0; row < height; ++row) {
            floats.quantize(context + row * values_stride, width, shape.o,
                            head.context + (first + row) * head.context_stride);
        }
    }
}

}  // namespace mrem::runtime
