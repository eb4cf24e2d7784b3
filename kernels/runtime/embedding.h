// hidden = LayerNorm(((word + type) + position)), word rows packed at a few bits, one scale per row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float_kernels.h"
#include "pool.h"

namespace mrem::runtime {

// Tables belong to the session. A null pointer is a table that the model does not have.
struct EmbeddingShape {
    std::size_t width;          // of the rows
    int bits, spacing, low;     // value = (spacing · code + low) · scale
    const std::uint8_t* codes;  // vocabulary rows of row_bytes(), code j in byte j / F, lowest bits first
    const float* scale;         // of each row
    const float *positions, *types;  // rows of floats
    const float *gamma, *beta;
    float epsilon;
    const std::uint8_t* hot_place8;    // for each row of the vocabulary its row in the hot table; 0: none
    const std::uint16_t* hot_place16;  // the same in two bytes; at most one of them is given
    const std::int8_t* hot_codes;
    const float* hot_scale;

    std::size_t row_bytes() const { return (width * static_cast<std::size_t>(bits) + 7) / 8; }
};

class Embedding {
  public:
    Embedding(const EmbeddingShape& shape, const FloatKernels& kernels) : shape_(shape), kernels_(kernels) {}

    // Requires: every id that belongs to a mask that is not 0 is a row of its table. `position_ids` has
    // `tokens` values for all examples together if `shared_positions`, else for each. `type_ids` may be null.
    void run(const std::int64_t* ids, const std::int64_t* mask, const std::int64_t* position_ids,
             bool shared_positions, const std::int64_t* type_ids, std::size_t batch, std::size_t tokens,
             Pool& pool, float* y) const;

  private:
    void fetch(std::int64_t id) const;
    void row(std::int64_t id, std::int64_t type, float* y) const;  // word + type

    EmbeddingShape shape_;
    const FloatKernels& kernels_;
};

}  // namespace mrem::runtime
