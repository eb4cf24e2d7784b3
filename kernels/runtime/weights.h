// A packed weight matrix, ready for a target: the caller's bytes, read in place, and what was derived of
// them.
#pragma once

#include <string>
#include <vector>

#include "float_kernels.h"
#include "proof.h"
#include "targets.h"

namespace mrem::runtime {

// A matrix of codes in panels (layout.h): 1 <= in <= kMostInputs.
struct Weight {
    const std::uint8_t* codes;  // packed_bytes(in, out, bits)
    const float* scale;         // of each output
    const float* bias;          // of each output
    std::size_t in, out;
    int bits, spacing, low;  // value = spacing · code + low
};

// The blocks of K that are unpacked at a time: all equal but for the last.
struct Blocks {
    std::size_t count, quads;  // of them, and in each; a multiple of the fields of a byte
};
Blocks blocks_of(const GemmKernels& kernels, std::size_t inputs, int bits);

// Whether weights are widened to 16 bits (GemmKernels::widen), and the panels of a tile.
inline bool widened(const GemmKernels& kernels, int bits) { return bits == 8 && kernels.widen != nullptr; }
inline std::size_t panels_of(const GemmKernels& kernels, int bits) {
    return widened(kernels, bits) ? kernels.wide_panels : kernels.panels;
}

class Weights {
  public:
    Weights() = default;
    // `x` is the grid of the left operand. The codes must outlive this; scale and bias are copied. Throws
    // std::invalid_argument if sums could exceed 32 bits or values 8 bits.
    Weights(const Target& target, const Weight& weight, const Grid& x);

    const std::uint8_t* panel(std::size_t p) const { return weight_.codes + p * panel_bytes(); }
    // From `quad` on, the first of a step.
    const std::uint8_t* codes(std::size_t p, std::size_t quad) const {
        return panel(p) + quad / fields(weight_.bits) * kStepBytes;
    }
    std::size_t panel_bytes() const { return steps(weight_.in, weight_.bits) * kStepBytes; }
    std::size_t inputs() const { return weight_.in; }
    std::size_t outputs() const { return weight_.out; }
    std::size_t panel_count() const { return columns_.size(); }
    Coding coding() const { return {weight_.bits, weight_.spacing, weight_.low}; }
    const Columns* columns() const { return columns_.data(); }

    // The runs for a panel and block, or null.
    const std::uint8_t* cuts(std::size_t panel, std::size_t block, std::size_t blocks) const {
        return cuts_.first.empty() ? nullptr : cuts_.lengths.data() + cuts_.first[panel * blocks + block];
    }

  private:
    Weight weight_{};
    std::vector<Columns> columns_;
    Cuts cuts_;
};

}  // namespace mrem::runtime
