// The contract is in embedding.h.
#include "embedding.h"

#include <algorithm>
#include <cstring>

namespace mrem::runtime {
namespace {

constexpr std::size_t kTokensPerTask = 32;

template <std::size_t kFields>
void look_up(const std::uint8_t* bytes, const float* values, float scale, std::size_t n, float* y) {
    const std::size_t whole = n / kFields;
    for (std::size_t i = 0; i < whole; ++i) {
        std::memcpy(y + kFields * i, values + kFields * bytes[i], kFields * sizeof(float));
    }
    if (n % kFields != 0) {
        std::memcpy(y + kFields * whole, values + kFields * bytes[whole], n % kFields * sizeof(float));
    }
    for (std::size_t i = 0; i < n; ++i) y[i] *= scale;
}

}  // namespace

Embedding::Embedding(const EmbeddingShape& shape, const FloatKernels& kernels)
    : shape_(shape), kernels_(kernels) {
    const int fields = 8 / shape.bits, most = (1 << shape.bits) - 1;
    for (int byte = 0; byte < 256; ++byte) {
        for (int field = 0; field < fields; ++field) {
            const int code = byte >> (field * shape.bits) & most;
            values_.push_back(static_cast<float>(shape.spacing * code + shape.low));
        }
    }
}

void Embedding::row(std::int64_t id, std::int64_t position, std::int64_t type, float* y) const {
    const std::size_t n = shape_.width;
    const auto token = static_cast<std::size_t>(id);
    const std::uint8_t* bytes = shape_.codes + token * shape_.row_bytes();
    const auto look = shape_.bits == 2 ? look_up<4> : shape_.bits == 4 ? look_up<2> : look_up<1>;
    look(bytes, values_.data(), shape_.scale[token], n, y);
    const std::size_t place = shape_.hot_place8 != nullptr    ? shape_.hot_place8[token]
                              : shape_.hot_place16 != nullptr ? shape_.hot_place16[token]
                                                              : 0;
    if (place != 0) {
        const std::int8_t* codes = shape_.hot_codes + place * n;
        const float scale = shape_.hot_scale[place];
        for (std::size_t i = 0; i < n; ++i) y[i] += static_cast<float>(codes[i]) * scale;
    }
    if (shape_.types != nullptr) {
        const float* row = shape_.types + static_cast<std::size_t>(type) * n;
        for (std::size_t i = 0; i < n; ++i) y[i] += row[i];
    }
    const float* row = shape_.positions + static_cast<std::size_t>(position) * n;
    layer_norm(kernels_, y, row, n, shape_.gamma, shape_.beta, shape_.epsilon, y);
}

void Embedding::run(const std::int64_t* ids, const std::int64_t* mask, const std::int64_t* position_ids,
                    bool shared_positions, const std::int64_t* type_ids, std::size_t batch,
                    std::size_t tokens, Pool& pool, float* y) const {
    const std::size_t total = batch * tokens, n = shape_.width;
    pool.parallel_for((total + kTokensPerTask - 1) / kTokensPerTask, [&](std::size_t task) {
        const std::size_t end = std::min(total, (task + 1) * kTokensPerTask);
        for (std::size_t i = task * kTokensPerTask; i < end; ++i) {
            if (mask[i] == 0) {
                std::fill_n(y + i * n, n, 0.0f);
            } else {
                const std::int64_t position = position_ids[shared_positions ? i % tokens : i];
                row(ids[i], position, type_ids == nullptr ? 0 : type_ids[i], y + i * n);
            }
        }
    });
}

}  // namespace mrem::runtime
