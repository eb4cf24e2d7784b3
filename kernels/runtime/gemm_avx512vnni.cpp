// The microkernels for the target "avx512vnni": vpdpbusd on 512 bits, sixteen columns by four inputs.
#include <immintrin.h>

#include "gemm_avx512.h"
#include "pack_x86.h"
#include "unroll.h"

namespace mrem::runtime {
namespace {

// The accumulators of R rows by P panels stay in registers; every quad loads P weights and R activations for
// R · P multiplications.
template <int R, int P>
void tile_of(const Tile& tile) {
    __m512i acc[R][P];
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) {
        MREM_UNROLLED
        for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_si512();
    }
    const std::uint8_t* a = tile.a;
    const std::int8_t* b = tile.b;
    const std::size_t a_stride = tile.a_stride, b_stride = tile.b_stride;
    for (std::size_t quad = 0; quad < tile.quads; ++quad, a += kQuad, b += kStepBytes) {
        __m512i w[P];
        MREM_UNROLLED
        for (int p = 0; p < P; ++p) w[p] = _mm512_load_si512(b + static_cast<std::size_t>(p) * b_stride);
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            std::int32_t four;
            memcpy(&four, a + static_cast<std::size_t>(r) * a_stride, sizeof four);
            const __m512i x = _mm512_set1_epi32(four);
            MREM_UNROLLED
            for (int p = 0; p < P; ++p) acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], x, w[p]);
        }
    }
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) {
        MREM_UNROLLED
        for (int p = 0; p < P; ++p) {
            std::int32_t* sums = tile.sums + static_cast<std::size_t>(r) * tile.sums_stride + p * 16;
            if (tile.add) acc[r][p] = _mm512_add_epi32(acc[r][p], _mm512_load_si512(sums));
            _mm512_store_si512(sums, acc[r][p]);
        }
    }
}

constexpr std::size_t kRows = 12, kPanels = 2;

using TileFunction = void (*)(const Tile&);
constexpr TileFunction kTiles[kRows][kPanels] = {
    {tile_of<1, 1>, tile_of<1, 2>},   {tile_of<2, 1>, tile_of<2, 2>},   {tile_of<3, 1>, tile_of<3, 2>},
    {tile_of<4, 1>, tile_of<4, 2>},   {tile_of<5, 1>, tile_of<5, 2>},   {tile_of<6, 1>, tile_of<6, 2>},
    {tile_of<7, 1>, tile_of<7, 2>},   {tile_of<8, 1>, tile_of<8, 2>},   {tile_of<9, 1>, tile_of<9, 2>},
    {tile_of<10, 1>, tile_of<10, 2>}, {tile_of<11, 1>, tile_of<11, 2>}, {tile_of<12, 1>, tile_of<12, 2>}};

void tile(std::size_t rows, std::size_t panels, const Tile& tile) { kTiles[rows - 1][panels - 1](tile); }

}  // namespace

const GemmKernels kAvx512VnniGemm = {"avx512vnni",    kRows,           kPanels, 192,           1,
                                     false,           unpack512,       tile,    dequantize512, pack_keys_x86,
                                     pack_values_x86, float_product512};

}  // namespace mrem::runtime
