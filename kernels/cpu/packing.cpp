// The contract is in packing.h.
//
// Eight codes of b bits are exactly b bytes, so a group of eight codes is squeezed inside one 64-bit word:
// lanes of one byte are merged in pairs to lanes of two, four and eight bytes. Unpacking runs the same steps
// backwards. Only the last, incomplete group differs: it goes through a buffer of eight codes, padded with
// zeros.
#include "packing.h"

#include <cassert>
#include <cstring>

namespace mrem {
namespace {

constexpr std::size_t kGroup = 8;  // codes per word

// The same value in every byte of a word.
constexpr std::uint64_t every_byte(std::uint64_t value) { return value * 0x0101010101010101u; }

// Little-endian on every machine; compilers turn the loops into single moves.
template <int Bytes>
std::uint64_t load(const std::uint8_t* from) {
    std::uint64_t word = 0;
    for (int i = 0; i < Bytes; ++i) word |= static_cast<std::uint64_t>(from[i]) << (8 * i);
    return word;
}

template <int Bytes>
void store(std::uint64_t word, std::uint8_t* to) {
    for (int i = 0; i < Bytes; ++i) to[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

constexpr std::uint64_t kEven1 = 0x00FF00FF00FF00FFu;  // the even lanes of one byte,
constexpr std::uint64_t kEven2 = 0x0000FFFF0000FFFFu;  // of two bytes,
constexpr std::uint64_t kEven4 = 0x00000000FFFFFFFFu;  // of four bytes

// Eight codes, one per byte -> the low 8 * Bits bits.
template <int Bits>
std::uint64_t squeeze(std::uint64_t x) {
    x &= every_byte((1u << Bits) - 1);
    x = (x & kEven1) | ((x >> 8 & kEven1) << Bits);
    x = (x & kEven2) | ((x >> 16 & kEven2) << (2 * Bits));
    x = (x & kEven4) | ((x >> 32) << (4 * Bits));
    return x;
}

// The low 8 * Bits bits -> eight codes, one per byte, with their sign.
template <int Bits>
std::uint64_t spread(std::uint64_t x) {
    constexpr std::uint64_t four = (std::uint64_t{1} << (4 * Bits)) - 1;
    constexpr std::uint64_t two = ((std::uint64_t{1} << (2 * Bits)) - 1) * 0x0000000100000001u;
    constexpr std::uint64_t one = ((std::uint64_t{1} << Bits) - 1) * 0x0001000100010001u;
    x = (x & four) | ((x >> (4 * Bits) & four) << 32);
    x = (x & two) | ((x >> (2 * Bits) & two) << 16);
    x = (x & one) | ((x >> Bits & one) << 8);
    // 0x01 in every byte whose code is negative, times the ones above the code: no carry leaves a byte.
    const std::uint64_t negative = (x >> (Bits - 1)) & every_byte(1);
    return x | negative * (0x100u - (1u << Bits));
}

template <int Bits>
void pack_words(const std::uint8_t* codes, std::size_t count, std::uint8_t* packed) {
    const std::size_t groups = count / kGroup;
    for (std::size_t g = 0; g < groups; ++g) {
        store<Bits>(squeeze<Bits>(load<kGroup>(codes + g * kGroup)), packed + g * Bits);
    }
    if (const std::size_t rest = count % kGroup; rest != 0) {
        std::uint8_t last_codes[kGroup] = {};
        std::uint8_t last_packed[Bits];
        std::memcpy(last_codes, codes + groups * kGroup, rest);
        store<Bits>(squeeze<Bits>(load<kGroup>(last_codes)), last_packed);
        std::memcpy(packed + groups * Bits, last_packed, packed_size(rest, Bits));
    }
}

template <int Bits>
void unpack_words(const std::uint8_t* packed, std::size_t count, std::uint8_t* codes) {
    const std::size_t groups = count / kGroup;
    for (std::size_t g = 0; g < groups; ++g) {
        store<kGroup>(spread<Bits>(load<Bits>(packed + g * Bits)), codes + g * kGroup);
    }
    if (const std::size_t rest = count % kGroup; rest != 0) {
        std::uint8_t last_packed[Bits] = {};
        std::uint8_t last_codes[kGroup];
        std::memcpy(last_packed, packed + groups * Bits, packed_size(rest, Bits));
        store<kGroup>(spread<Bits>(load<Bits>(last_packed)), last_codes);
        std::memcpy(codes + groups * kGroup, last_codes, rest);
    }
}

}  // namespace

bool is_packable(int bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 8; }

std::size_t packed_size(std::size_t count, int bits) {
    assert(is_packable(bits));
    const auto width = static_cast<std::size_t>(bits);
    return count / kGroup * width + (count % kGroup * width + 7) / 8;
}

void pack(const std::int8_t* codes, std::size_t count, int bits, std::uint8_t* packed) {
    assert(is_packable(bits));
    assert(count == 0 || (codes != nullptr && packed != nullptr));
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(codes);  // same two's complement bits
    switch (bits) {
        case 2:
            return pack_words<2>(bytes, count, packed);
        case 3:
            return pack_words<3>(bytes, count, packed);
        case 4:
            return pack_words<4>(bytes, count, packed);
        default:
            if (count != 0) std::memcpy(packed, bytes, count);
    }
}

void unpack(const std::uint8_t* packed, std::size_t count, int bits, std::int8_t* codes) {
    assert(is_packable(bits));
    assert(count == 0 || (codes != nullptr && packed != nullptr));
    auto* bytes = reinterpret_cast<std::uint8_t*>(codes);
    switch (bits) {
        case 2:
            return unpack_words<2>(packed, count, bytes);
        case 3:
            return unpack_words<3>(packed, count, bytes);
        case 4:
            return unpack_words<4>(packed, count, bytes);
        default:
            if (count != 0) std::memcpy(bytes, packed, count);
    }
}

}  // namespace mrem
