// The contract is in embedding.h.
#include "embedding.h"

#include <algorithm>

#include "prefetch.h"

namespace mrem::runtime {
namespace {

constexpr std::size_t kTokensPerTask = 32;

}  // namespace

void Embedding::row(std::int64_t id, std::int64_t type, float* y) const {
    const std::size_t n = shape_.width;
    const auto token = static_cast<std::size_t>(id);
    const PackedRow word{shape_.codes + token * shape_.row_bytes(), shape_.bits, shape_.spacing, shape_.low,
                         shape_.scale[token]};
    const float* of_type = shape_.types;
    if (of_type != nullptr) of_type += static_cast<std::size_t>(type) * n;
    const std::size_t place = shape_.hot_place8 != nullptr    ? shape_.hot_place8[token]
                              : shape_.hot_place16 != nullptr ? shape_.hot_place16[token]
                                                              : 0;
    if (place == 0) return kernels_.expand(word, of_type, n, y);
    kernels_.expand(word, nullptr, n, y);
    const std::int8_t* codes = shape_.hot_codes + place * n;
    const float scale = shape_.hot_scale[place];
    for (std::size_t i = 0; i < n; ++i) y[i] += static_cast<float>(codes[i]) * scale;
    for (std::size_t i = 0; of_type != nullptr && i < n; ++i) y[i] += of_type[i];
}

void Embedding::fetch(std::int64_t id) const {
    const auto token = static_cast<std::size_t>(id);
    const std::size_t bytes = shape_.row_bytes();
    prefetch<true>(shape_.scale + token);
    if (shape_.hot_place8 != nullptr) prefetch<true>(shape_.hot_place8 + token);
    if (shape_.hot_place16 != nullptr) prefetch<true>(shape_.hot_place16 + token);
    for (std::size_t at = 0; at < bytes; at += 64) prefetch<true>(shape_.codes + token * bytes + at);
    prefetch<true>(shape_.codes + (token + 1) * bytes - 1);
}

void Embedding::run(const std::int64_t* ids, const std::int64_t* mask, const std::int64_t* position_ids,
                    bool shared_positions, const std::int64_t* type_ids, std::size_t batch,
                    std::size_t tokens, Pool& pool, float* y) const {
    const std::size_t total = batch * tokens, n = shape_.width;
    pool.parallel_for((total + kTokensPerTask - 1) / kTokensPerTask, [&](std::size_t task) {
        const std::size_t end = std::min(total, (task + 1) * kTokensPerTask);
        const float* places[kTokensPerTask];
        float* rows[kTokensPerTask];
        std::size_t count = 0;
        const std::size_t first = task * kTokensPerTask;
        for (std::size_t i = first; i < end; ++i) {  // rows are anywhere in a large table
            if (mask[i] != 0) fetch(ids[i]);
        }
        for (std::size_t i = first; i < end; ++i) {
            if (mask[i] == 0) {
                std::fill_n(y + i * n, n, 0.0f);
                continue;
            }
            row(ids[i], type_ids == nullptr ? 0 : type_ids[i], y + i * n);
            const auto position = static_cast<std::size_t>(position_ids[shared_positions ? i % tokens : i]);
            places[count] = shape_.positions + position * n;
            rows[count++] = y + i * n;
        }
        kernels_.layer_norm(count, rows, places, n, shape_.gamma, shape_.beta, shape_.epsilon, rows);
    });
}

}  // namespace mrem::runtime
