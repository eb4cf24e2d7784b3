// The instructions of AMX, or a stand-in for them: with MREM_AMX_EMULATED tiles are plain arrays, so that the
// code around them runs, and is tested, on any processor with AVX-512.
#pragma once

#ifndef MREM_AMX_EMULATED

#include <immintrin.h>
#define MREM_AMX_TABLE kAmxGemm
#define MREM_TILE_CONFIGURE(from) _tile_loadconfig(from)
#define MREM_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define MREM_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define MREM_TILE_MULTIPLY(sums, a, b) _tile_dpbusd(sums, a, b)
#define MREM_TILE_RELEASE() _tile_release()

#else

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define MREM_AMX_TABLE kEmulatedAmxGemm

namespace mrem::runtime {

struct EmulatedTiles {
    std::uint16_t bytes[8];
    std::uint8_t rows[8];
    std::uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles;

inline void emulated_load_configuration(const void* from) {
    const auto* bytes = static_cast<const std::uint8_t*>(from);
    if (bytes[0] != 1) std::abort();
    std::memset(&emulated_tiles, 0, sizeof emulated_tiles);
    std::memcpy(emulated_tiles.bytes, bytes + 16, sizeof emulated_tiles.bytes);
    std::memcpy(emulated_tiles.rows, bytes + 48, sizeof emulated_tiles.rows);
    for (int tile = 0; tile < 8; ++tile) {  // what the processor refuses
        if (emulated_tiles.rows[tile] > 16 || emulated_tiles.bytes[tile] > 64) std::abort();
    }
}

inline void emulated_move(int tile, void* memory, std::size_t stride, bool load) {
    if (emulated_tiles.rows[tile] == 0 || emulated_tiles.bytes[tile] == 0) std::abort();
    for (std::size_t row = 0; row < emulated_tiles.rows[tile]; ++row) {
        std::uint8_t *inside = emulated_tiles.data[tile][row], *outside = static_cast<std::uint8_t*>(memory);
        outside += row * stride;
        std::memcpy(load ? inside : outside, load ? outside : inside, emulated_tiles.bytes[tile]);
    }
}

// As the manual has it: sums[m][n] += Σ a[m][k] · b[k / 4][4n + k % 4].
inline void emulated_multiply(int sums, int a, int b) {
    const EmulatedTiles& tiles = emulated_tiles;
    if (tiles.rows[sums] != tiles.rows[a] || tiles.bytes[sums] != tiles.bytes[b]) std::abort();
    if (tiles.bytes[a] != 4 * tiles.rows[b]) std::abort();
    for (std::size_t m = 0; m < tiles.rows[sums]; ++m) {
        for (std::size_t n = 0; n < tiles.bytes[sums] / 4u; ++n) {
            std::int32_t sum;
            std::memcpy(&sum, tiles.data[sums][m] + 4 * n, sizeof sum);
            for (std::size_t k = 0; k < tiles.bytes[a]; ++k) {
                sum += tiles.data[a][m][k] * static_cast<std::int8_t>(tiles.data[b][k / 4][4 * n + k % 4]);
            }
            std::memcpy(emulated_tiles.data[sums][m] + 4 * n, &sum, sizeof sum);
        }
    }
}

}  // namespace mrem::runtime

#define MREM_TILE_CONFIGURE(from) emulated_load_configuration(from)
#define MREM_TILE_LOAD(tile, from, stride) \
    emulated_move(tile, const_cast<void*>(static_cast<const void*>(from)), stride, true)
#define MREM_TILE_STORE(tile, to, stride) emulated_move(tile, to, stride, false)
#define MREM_TILE_MULTIPLY(sums, a, b) emulated_multiply(sums, a, b)
#define MREM_TILE_RELEASE() static_cast<void>(0)

#endif
