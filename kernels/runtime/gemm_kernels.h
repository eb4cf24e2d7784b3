// The integer microkernels, as one table for every instruction set: u8 activation codes times s8 weights with
// exact 32-bit sums. What combines them over a matrix is in gemm.cpp and attention.cpp.
//
// Both operands of a product are read in quads, four consecutive inputs. The left one is row-major bytes; of
// the right one there are panels of sixteen columns, [quads][16 columns][4 inputs] signed bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace mrem::runtime {

// A stored code u of `bits` bits stands for spacing · u + low, which fits into a signed byte.
struct Coding {
    int bits = 8, spacing = 1, low = -128;
};

// What makes floats of the sums of a panel: y = float(sum − offset) · scale + bias, rounded after each step.
struct Columns {
    std::int32_t offset[kPanel];
    float scale[kPanel], bias[kPanel];
};

// Runs (Tile::cuts) are whole groups of quads where the weights allow: a kernel's loop has several in each
// round.
constexpr std::size_t kGroup = 4;

// sums[row][16p + c] (+)= Σ a[row][i] · b[p][i][c]
struct Tile {
    const std::uint8_t* a;  // rows of 4 · quads bytes, readable up to the next 64
    std::size_t a_stride;
    const std::int8_t* b;  // panels of 64 · quads bytes, aligned to 64
    std::size_t b_stride;  // bytes from panel to panel
    std::size_t quads;
    std::int32_t* sums;  // aligned to 64
    std::size_t sums_stride;
    bool add;                  // to what `sums` holds
    const std::uint8_t* cuts;  // lengths of runs, in quads, whose sums fit into 16 bits; or null (proof.h)
    const std::int16_t* wide;  // what GemmKernels::widen made of b, with the same distances; or null
};

// The weights of a tile as they are stored: panels of packed bytes, `stride` apart.
struct Packed {
    const std::uint8_t* codes;
    std::size_t stride;
    Coding coding;
    std::int8_t* keep;  // where tiles that follow want them unpacked, with Tile::b_stride; or null
    std::size_t ahead;  // what lies so many bytes behind is fetched for the next block
};

struct GemmKernels {
    const char* name;
    std::size_t rows, panels;  // the largest tile
    std::size_t depth;         // most quads of a block that stays in the first cache, a multiple of 16
    std::size_t quads;         // above 16, the number of quads is a multiple of this
    bool cuts;                 // uses runs with 16-bit sums, if it is given any, for a tile of one panel

    // `steps` steps of one panel of packed weights to signed bytes.
    void (*unpack)(const std::uint8_t* packed, std::size_t steps, const Coding& coding, std::int8_t* b);

    // A target that multiplies bytes only where such runs are: other weights, of 8 bits, and the operands of
    // attention are widened to 16 bits once for all tiles. Null: no target for which that would help.
    void (*widen)(const std::int8_t* b, std::size_t quads, std::int16_t* wide);
    std::size_t wide_panels, wide_depth;  // the largest tile and block then

    // 1 <= rows and panels, up to the largest.
    void (*tile)(std::size_t rows, std::size_t panels, const Tile& tile);

    // The first tile of a block: unpacks weights while it multiplies by them; Tile::b is not read. Does
    // nothing and returns false where unpacking first is as good. Null: always.
    bool (*tile_unpacking)(std::size_t rows, std::size_t panels, const Tile& tile, const Packed& packed);

    // y[row][16p + c], with strides that are counted in elements.
    void (*dequantize)(std::size_t rows, std::size_t panels, const std::int32_t* sums,
                       std::size_t sums_stride, const Columns* columns, float* y, std::size_t y_stride);

    // The transpose of `tokens` rows of `width` codes as a right operand (code − 128): columns are tokens.
    // Writes panels(tokens) panels of `quads` quads, zeros beyond tokens and width. sums[token] = Σ (code −
    // 128), zeros up to the end of the panel.
    void (*pack_keys)(const std::uint8_t* codes, std::size_t stride, std::size_t tokens, std::size_t width,
                      std::size_t quads, std::int8_t* b, std::int32_t* sums);

    // The same rows as they are: columns are the `width` codes, inputs the tokens.
    void (*pack_values)(const std::uint8_t* codes, std::size_t stride, std::size_t tokens, std::size_t width,
                        std::size_t quads, std::int8_t* b);

    // y[row][c] = Σ a[row][i] · b[i][c], in the order of i, one fma each. columns is a multiple of 16, and so
    // are the strides of b and y: columns.
    void (*float_product)(std::size_t rows, std::size_t columns, std::size_t depth, const float* a,
                          std::size_t a_stride, const float* b, float* y);
};

extern const GemmKernels kScalarGemm;
#ifdef MREM_RUNTIME_HAVE_AVX2
extern const GemmKernels kAvx2Gemm;
#endif
#ifdef MREM_RUNTIME_HAVE_AVXVNNI
extern const GemmKernels kAvxVnniGemm;
#endif
#ifdef MREM_RUNTIME_HAVE_AVX512VNNI
extern const GemmKernels kAvx512VnniGemm;
#endif
#ifdef MREM_RUNTIME_HAVE_AMX
extern const GemmKernels kAmxGemm;
extern const GemmKernels kEmulatedAmxGemm;  // in tests only: the same code with plain arrays for tiles
#endif

}  // namespace mrem::runtime
