// Packing of any bytes, for libFuzzer: `make fuzz` builds and runs it with clang. Every buffer is a heap
// block of exactly the size that the contract in packing.h names, so that the sanitizers catch one byte too
// far.
//
// The first byte of an input chooses the bits, the second how many codes are missing in the last byte; the
// others are codes, and then packed bytes.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "packing.h"

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

// Bit k of the stream is bit k % 8 of byte k / 8.
unsigned stream_bit(const std::uint8_t* packed, std::size_t k) { return packed[k / 8] >> (k % 8) & 1u; }

// Whether code i of the stream is `code`, bit by bit, with the sign in all bits above.
bool is_code(const std::uint8_t* packed, std::size_t i, int bits, std::int8_t code) {
    const auto width = static_cast<std::size_t>(bits);
    for (std::size_t bit = 0; bit < 8; ++bit) {
        const std::size_t k = i * width + (bit < width ? bit : width - 1);
        if (stream_bit(packed, k) != (static_cast<std::uint8_t>(code) >> bit & 1u)) return false;
    }
    return true;
}

void check_pack(const std::uint8_t* bytes, std::size_t count, int bits) {
    const std::size_t size = mrem::packed_size(count, bits);
    const auto codes = std::make_unique<std::int8_t[]>(count);
    const auto packed = std::make_unique<std::uint8_t[]>(size);
    const auto restored = std::make_unique<std::int8_t[]>(count);
    const int half = 1 << (bits - 1);
    for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(bytes[i] % (2 * half) - half);
    std::memset(packed.get(), 0xA5, size);
    mrem::pack(codes.get(), count, bits, packed.get());
    for (std::size_t i = 0; i < count; ++i) require(is_code(packed.get(), i, bits, codes[i]));
    for (std::size_t k = count * static_cast<std::size_t>(bits); k < 8 * size; ++k) {
        require(stream_bit(packed.get(), k) == 0);
    }
    mrem::unpack(packed.get(), count, bits, restored.get());
    require(count == 0 || std::memcmp(codes.get(), restored.get(), count) == 0);
}

void check_unpack(const std::uint8_t* bytes, std::size_t size, int bits, std::size_t missing) {
    const std::size_t most = size * 8 / static_cast<std::size_t>(bits);
    const std::size_t count = most - (missing < most ? missing : most);
    if (mrem::packed_size(count, bits) != size) return;
    const auto packed = std::make_unique<std::uint8_t[]>(size);
    const auto codes = std::make_unique<std::int8_t[]>(count);
    if (size != 0) std::memcpy(packed.get(), bytes, size);
    mrem::unpack(packed.get(), count, bits, codes.get());
    for (std::size_t i = 0; i < count; ++i) require(is_code(packed.get(), i, bits, codes[i]));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    constexpr int kBits[] = {2, 3, 4, 8};
    const int bits = kBits[data[0] % 4];
    check_pack(data + 2, size - 2, bits);
    check_unpack(data + 2, size - 2, bits, data[1] % 4u);
    return 0;
}
