// Tests of packing.cpp without Python, for the sanitizers: every buffer is a heap block of exactly the size
// that the contract names, so that one byte too far is caught. Truth is a bit-by-bit version of the header's
// formula.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "packing.h"

namespace {

void check(bool holds, const char* what, int bits, std::size_t count) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (bits %d, count %zu)\n", what, bits, count);
    std::exit(1);
}

// Stream bit k is bit k % 8 of byte k / 8; code i has the stream's bits [i * bits, (i + 1) * bits).
void pack_bit_by_bit(const std::int8_t* codes, std::size_t count, int bits, std::uint8_t* packed) {
    const auto width = static_cast<std::size_t>(bits);
    for (std::size_t k = 0; k < count * width; ++k) {
        const unsigned code = static_cast<std::uint8_t>(codes[k / width]);
        if (k % 8 == 0) packed[k / 8] = 0;
        packed[k / 8] = static_cast<std::uint8_t>(packed[k / 8] | (code >> (k % width) & 1u) << (k % 8));
    }
}

void check_known_bytes() {
    const std::int8_t two[] = {0, 1, -2, -1, -1};  // 00 01 10 11 | 11, lowest first
    std::uint8_t bytes[3];
    mrem::pack(two, 5, 2, bytes);
    check(bytes[0] == 0xE4 && bytes[1] == 0x03, "known bytes", 2, 5);

    const std::int8_t three[] = {-4, 3, -1, 1};  // 4 + 3 * 8 + 7 * 64 + 1 * 512 = 0x3DC
    mrem::pack(three, 4, 3, bytes);
    check(bytes[0] == 0xDC && bytes[1] == 0x03, "known bytes", 3, 4);

    const std::int8_t four[] = {-8, 7, -1};
    mrem::pack(four, 3, 4, bytes);
    check(bytes[0] == 0x78 && bytes[1] == 0x0F, "known bytes", 4, 3);
}

void check_round_trip(int bits, std::size_t count, std::mt19937& random) {
    const std::size_t size = mrem::packed_size(count, bits);
    check(size == (count * static_cast<std::size_t>(bits) + 7) / 8, "packed_size", bits, count);

    const auto codes = std::make_unique<std::int8_t[]>(count);
    const auto restored = std::make_unique<std::int8_t[]>(count);
    const auto packed = std::make_unique<std::uint8_t[]>(size);
    const auto expected = std::make_unique<std::uint8_t[]>(size);
    const int half = 1 << (bits - 1);
    std::uniform_int_distribution<int> draw(-half, half - 1);
    for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(draw(random));
    for (std::size_t i = 0; i < size; ++i) packed[i] = 0xA5;  // old contents must not show in the result

    mrem::pack(codes.get(), count, bits, packed.get());
    pack_bit_by_bit(codes.get(), count, bits, expected.get());
    for (std::size_t i = 0; i < size; ++i) check(packed[i] == expected[i], "packed bytes", bits, count);

    mrem::unpack(packed.get(), count, bits, restored.get());
    for (std::size_t i = 0; i < count; ++i) check(restored[i] == codes[i], "round trip", bits, count);
}

}  // namespace

int main() {
    std::mt19937 random(0);
    check_known_bytes();
    for (const int bits : {2, 3, 4, 8}) {
        // 0..70 passes every remainder of a group several times; then primes, around and far above a word.
        for (std::size_t count = 0; count <= 70; ++count) check_round_trip(bits, count, random);
        for (const std::size_t count : {127u, 1021u, 8191u, 65537u}) check_round_trip(bits, count, random);
        for (int i = 0; i < 200; ++i) check_round_trip(bits, random() % 5000, random);
    }
    check(mrem::packed_size(SIZE_MAX, 8) == SIZE_MAX, "packed_size without overflow", 8, SIZE_MAX);
    for (const int bits : {-1, 0, 1, 5, 6, 7, 9, 16}) check(!mrem::is_packable(bits), "is_packable", bits, 0);
    std::puts("packing: all C++ tests passed");
    return 0;
}
