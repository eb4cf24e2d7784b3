// Packing of signed low-bit codes into bytes: the stored form of quantized weights.
//
// The packed form is one dense little-endian bit stream: code i occupies the bits [i * bits, (i + 1) * bits),
// and bit k of the stream is bit k % 8 of byte k / 8, so the first code sits in the lowest bits of the first
// byte. Codes are two's complement. For 2 and 4 bits this is the element order of ONNX's INT2 and INT4. With
// 3 bits a code may straddle two bytes. Note: the unused high bits of the last byte are written as zero and
// ignored when unpacking.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mrem {

// Whether `bits` is a width that can be packed: 2, 3, 4 or 8.
bool is_packable(int bits);

// Number of bytes that `count` codes take: ceil(count * bits / 8), without overflow for any count.
// Requires: is_packable(bits).
std::size_t packed_size(std::size_t count, int bits);

// Writes packed_size(count, bits) bytes.
// Requires: is_packable(bits); `codes` has `count` elements; the arrays do not overlap. Of a code outside
// [-2^(bits-1), 2^(bits-1) - 1] only the low bits are kept: the caller checks the range.
void pack(const std::int8_t* codes, std::size_t count, int bits, std::uint8_t* packed);

// Writes `count` codes. Requires: is_packable(bits); `packed` has packed_size(count, bits) bytes; no overlap.
void unpack(const std::uint8_t* packed, std::size_t count, int bits, std::int8_t* codes);

}  // namespace mrem
