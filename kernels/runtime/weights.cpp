// The contract is in weights.h.
#include "weights.h"

#include <algorithm>
#include <stdexcept>

#include "scratch.h"

namespace mrem::runtime {
namespace {

// What is wrong with the numbers, or an empty string.
std::string problem_of(const Weight& weight, const Grid& x) {
    const Coding coding{weight.bits, weight.spacing, weight.low};
    if (!is_width(coding.bits)) return "bits must be 2, 4 or 8, not " + std::to_string(coding.bits);
    if (weight.in == 0 || weight.out == 0) return "a weight has no inputs or no outputs";
    if (weight.in > kMostInputs) {
        return "a weight has " + std::to_string(weight.in) + " inputs; more than " +
               std::to_string(kMostInputs) + " could exceed 32-bit sums";
    }
    if (weight.out > SIZE_MAX / 2 / (weight.in + kStepBytes)) return "a weight is too large";
    const bool bytewise = coding.spacing == 1 && coding.low == -128;
    if (coding.bits == 8 && !bytewise) return "8-bit codes need spacing 1 and low -128";
    if (coding.spacing < 1 || coding.spacing > 255 || coding.low < -128 ||
        coding.low + coding.spacing * ((1 << coding.bits) - 1) > 127) {
        return "spacing " + std::to_string(coding.spacing) + " and low " + std::to_string(coding.low) +
               " do not give values of 8 bits";
    }
    const bool ordered = 0 <= x.low && x.low <= x.high && x.high <= 255;
    if (!ordered || x.zero_point < 0 || x.zero_point > 255) return "activation codes must be within 0 to 255";
    if (!(x.scale > 0.0f)) return "a scale of activations must be positive";
    return "";
}

}  // namespace

Blocks blocks_of(const GemmKernels& kernels, std::size_t inputs, int bits) {
    // A multiple of 4, 2 and 1 fields, and of 32 bytes of activations, which kernels read at a time.
    const std::size_t unit = kernels.quads > 8 ? kernels.quads : 8;
    const std::size_t quads = steps(inputs, bits) * fields(bits);
    const std::size_t count = ceil_div(quads, widened(kernels, bits) ? kernels.wide_depth : kernels.depth);
    return {count, round_up(ceil_div(quads, count), unit)};
}

Weights::Weights(const Target& target, const Weight& weight, const Grid& x) : weight_(weight) {
    const std::string problem = problem_of(weight, x);
    if (!problem.empty()) throw std::invalid_argument(problem);
    const int bits = weight.bits;
    const std::size_t all_panels = panels(weight.out), per_step = fields(bits);
    const std::size_t all_quads = steps(weight.in, bits) * per_step;
    const GemmKernels& kernels = *target.gemm;
    const Blocks blocks = blocks_of(kernels, weight.in, bits);
    columns_.assign(all_panels, Columns{});
    cuts_ = Cuts{};
    bool proved = kernels.cuts && !widened(kernels, bits);

    Buffer<std::int8_t> unpacked(blocks.quads * kStepBytes);
    for (std::size_t p = 0; p < all_panels; ++p) {
        std::int32_t sums[kPanel] = {};
        for (std::size_t block = 0; block < blocks.count; ++block) {
            const std::size_t first = block * blocks.quads;
            const std::size_t quads = std::min(blocks.quads, all_quads - first);
            kernels.unpack(panel(p) + first / per_step * kStepBytes, quads / per_step, coding(),
                           unpacked.data());
            const std::size_t real = std::min(quads * kQuad, weight.in - first * kQuad);
            for (std::size_t k = 0; k < real; ++k) {
                const std::int8_t* row = unpacked.data() + k / kQuad * kStepBytes + k % kQuad;
                for (std::size_t c = 0; c < kPanel; ++c) sums[c] += row[c * kQuad];
            }
            if (!proved) continue;
            cuts_.first.push_back(static_cast<std::uint32_t>(cuts_.lengths.size()));
            proved = append_runs(unpacked.data(), quads, &cuts_.lengths);
        }
        Columns& by = columns_[p];
        for (std::size_t c = 0; c < kPanel && p * kPanel + c < weight.out; ++c) {
            by.offset[c] = x.zero_point * sums[c];
            by.scale[c] = x.scale * weight.scale[p * kPanel + c];
            by.bias[c] = weight.bias[p * kPanel + c];
        }
    }
    if (!proved) cuts_ = Cuts{};
    cuts_.lengths.shrink_to_fit();
    cuts_.first.shrink_to_fit();
}

}  // namespace mrem::runtime
