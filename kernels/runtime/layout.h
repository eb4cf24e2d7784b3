// The layout of packed weights, in the file and in memory: panels of sixteen output columns.
//
// Bytes [panels(N)][steps(K)][64]. A step holds G = 4 · F inputs of sixteen columns, F = 8 / bits codes in
// each byte. Byte 4c + k of (panel p, step s), bits [f · bits, (f + 1) · bits) with the lowest first, is the
// unsigned code u of weight[k_in = s · G + 4f + k, n_out = 16p + c]; its value is spacing · u + low. Padding
// (k_in >= K or n_out >= N) has u = 0.
//
// Why: the sixty-four bytes of one field f are the operand of one instruction that multiplies four inputs of
// sixteen columns (vpdpbusd), two halves of it those of AVX2, and sixteen of them a tile of AMX. A kernel
// unpacks by shift and mask and moves nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mrem::runtime {

constexpr std::size_t kPanel = 16;      // output columns of a panel
constexpr std::size_t kQuad = 4;        // inputs that one instruction adds up
constexpr std::size_t kStepBytes = 64;  // kPanel · kQuad
// 255 · 128 · K stays below 2^31: every sum fits into 32 bits.
constexpr std::size_t kMostInputs = 65536;

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
constexpr std::size_t round_up(std::size_t a, std::size_t b) { return ceil_div(a, b) * b; }

constexpr bool is_width(int bits) { return bits == 2 || bits == 4 || bits == 8; }
constexpr std::size_t fields(int bits) { return 8u / static_cast<unsigned>(bits); }
constexpr std::size_t step_inputs(int bits) { return kQuad * fields(bits); }
constexpr std::size_t panels(std::size_t columns) { return ceil_div(columns, kPanel); }
constexpr std::size_t steps(std::size_t inputs, int bits) { return ceil_div(inputs, step_inputs(bits)); }
constexpr std::size_t packed_bytes(std::size_t inputs, std::size_t columns, int bits) {
    return panels(columns) * steps(inputs, bits) * kStepBytes;
}

// Where the code of weight[input, column] is: a byte, and the number of bits to shift it right.
struct Place {
    std::size_t byte;
    int shift;
};
constexpr Place place_of(std::size_t input, std::size_t column, std::size_t inputs, int bits) {
    const std::size_t group = step_inputs(bits), step = input / group, in_step = input % group;
    const std::size_t panel = column / kPanel;
    return {(panel * steps(inputs, bits) + step) * kStepBytes + column % kPanel * kQuad + in_step % kQuad,
            static_cast<int>(in_step / kQuad) * bits};
}

}  // namespace mrem::runtime
