// Where sums of 16 bits are exact: the proof from the actual weights.
//
// vpmaddubsw multiplies u8 activations by s8 weights and adds two products to a signed 16-bit lane; adding
// such lanes in 16 bits does twice the work of widening them each time. Whatever the activations are, the
// partial sums of a lane stay within 255 · Σ w⁺ above and 255 · Σ |w⁻| below. As long as both sums of weights
// stay within kMostWeight, no partial sum leaves 16 bits, in any order of addition.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm_kernels.h"

namespace mrem::runtime {

constexpr int kMostWeight = 32767 / 255;  // 128

// Runs of quads for every panel and block of inputs, as long as the weights allow.
struct Cuts {
    std::vector<std::uint8_t> lengths;  // at most 252 each; those of a block add up to its quads
    std::vector<std::uint32_t> first;   // of (panel, block) in `lengths`; empty if some single quad is too
                                        // heavy, so that 16 bits are never enough
};

// The runs of one unpacked block. False if a single quad exceeds 16 bits.
bool append_runs(const std::int8_t* b, std::size_t quads, std::vector<std::uint8_t>* lengths);

}  // namespace mrem::runtime
