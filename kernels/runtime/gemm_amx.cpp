// The microkernels for the target "amx": tdpbusd on tiles of sixteen rows by 64 bytes.
//
// Note: the shapes of tiles are those of palette 1, hard-coded. Virtual machines exist that announce AMX but
// hide the CPUID leaves that describe palettes.
#include "amx.h"
#include "gemm_avx512.h"
#include "pack_x86.h"

namespace mrem::runtime {
namespace {

constexpr std::size_t kTileRows = 16, kTileQuads = 16;

// The argument of ldtilecfg.
struct alignas(64) Configuration {
    std::uint8_t palette, start_row;
    std::uint8_t reserved[14];
    std::uint16_t bytes[16];  // of a row of each tile
    std::uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64, "defined by the processor");

// Tiles 0 to 3: sums, two of rows by two of columns. 4 and 5: activations. 6 and 7: weights.
void configure(std::size_t upper, std::size_t lower, std::size_t quads) {
    Configuration made{};
    made.palette = 1;
    const auto set = [&made](int tile, std::size_t rows, std::size_t bytes) {
        made.rows[tile] = static_cast<std::uint8_t>(rows);
        made.bytes[tile] = static_cast<std::uint16_t>(bytes);
    };
    set(0, upper, 64), set(1, upper, 64), set(4, upper, quads * kQuad);
    if (lower > 0) set(2, lower, 64), set(3, lower, 64), set(5, lower, quads * kQuad);
    set(6, quads, 64), set(7, quads, 64);
    // The intrinsic of GCC says that it reads a pointer's worth of it, so the other stores could be left out.
    __asm__ volatile("" : : "r"(&made) : "memory");
    MREM_TILE_CONFIGURE(&made);
}

// Sums of a block that continues another begin where that one ended.
void tile(std::size_t rows, std::size_t panels, const Tile& tile) {
    const std::size_t upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
    const std::size_t quads = tile.quads < kTileQuads ? tile.quads : kTileQuads;
    const bool tall = lower > 0, broad = panels > 1;
    const std::size_t sums_stride = tile.sums_stride * sizeof(std::int32_t);
    std::int32_t* below = tile.sums + kTileRows * tile.sums_stride;
    configure(upper, lower, quads);
    if (tile.add) {
        MREM_TILE_LOAD(0, tile.sums, sums_stride);
        if (broad) MREM_TILE_LOAD(1, tile.sums + kPanel, sums_stride);
        if (tall) MREM_TILE_LOAD(2, below, sums_stride);
        if (tall && broad) MREM_TILE_LOAD(3, below + kPanel, sums_stride);
    }  // else zeros: loading a configuration clears all tiles
    const std::uint8_t* a = tile.a;
    const std::int8_t* b = tile.b;
    for (std::size_t quad = 0; quad < tile.quads;
         quad += quads, a += quads * kQuad, b += quads * kStepBytes) {
        MREM_TILE_LOAD(4, a, tile.a_stride);
        MREM_TILE_LOAD(6, b, kStepBytes);
        MREM_TILE_MULTIPLY(0, 4, 6);
        if (broad) {
            MREM_TILE_LOAD(7, b + tile.b_stride, kStepBytes);
            MREM_TILE_MULTIPLY(1, 4, 7);
        }
        if (tall) {
            MREM_TILE_LOAD(5, a + kTileRows * tile.a_stride, tile.a_stride);
            MREM_TILE_MULTIPLY(2, 5, 6);
            if (broad) MREM_TILE_MULTIPLY(3, 5, 7);
        }
    }
    MREM_TILE_STORE(0, tile.sums, sums_stride);
    if (broad) MREM_TILE_STORE(1, tile.sums + kPanel, sums_stride);
    if (tall) MREM_TILE_STORE(2, below, sums_stride);
    if (tall && broad) MREM_TILE_STORE(3, below + kPanel, sums_stride);
    MREM_TILE_RELEASE();
}

}  // namespace

const GemmKernels MREM_AMX_TABLE = {
    "amx", 2 * kTileRows, 2,       192,           kTileQuads,    false,           unpack512,       nullptr, 0,
    0,     tile,          nullptr, dequantize512, pack_keys_x86, pack_values_x86, float_product512};

}  // namespace mrem::runtime
