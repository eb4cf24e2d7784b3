// The microkernels for the target "avxvnni": vpdpbusd on 256 bits, for processors without AVX-512.
#include "gemm_avx2.h"
#include "pack_x86.h"
#include "unroll.h"

namespace mrem::runtime {
namespace {

// R rows by sixteen columns.
template <int R>
void tile_of(const Tile& tile) {
    const std::uint8_t* a = tile.a;
    const std::int8_t* b = tile.b;
    const std::size_t stride = tile.a_stride;
    __m256i acc[R][2];
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (std::size_t quad = 0; quad < tile.quads; ++quad, a += kQuad, b += kStepBytes) {
        const __m256i w0 = load256(b), w1 = load256(b + 32);
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            std::int32_t four;
            memcpy(&four, a + static_cast<std::size_t>(r) * stride, sizeof four);
            const __m256i x = _mm256_set1_epi32(four);
            acc[r][0] = _mm256_dpbusd_avx_epi32(acc[r][0], x, w0);
            acc[r][1] = _mm256_dpbusd_avx_epi32(acc[r][1], x, w1);
        }
    }
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) {
        std::int32_t* sums = tile.sums + static_cast<std::size_t>(r) * tile.sums_stride;
        MREM_UNROLLED
        for (int half = 0; half < 2; ++half) {
            std::int32_t* to = sums + 8 * half;
            store256(to, tile.add ? _mm256_add_epi32(acc[r][half], load256(to)) : acc[r][half]);
        }
    }
}

using TileFunction = void (*)(const Tile&);
constexpr std::size_t kRows = 6;
constexpr TileFunction kTiles[kRows] = {tile_of<1>, tile_of<2>, tile_of<3>,
                                        tile_of<4>, tile_of<5>, tile_of<6>};

void tile(std::size_t rows, std::size_t, const Tile& tile) { kTiles[rows - 1](tile); }

}  // namespace

const GemmKernels kAvxVnniGemm = {"avxvnni",
                                  kRows,
                                  1,
                                  256,
                                  1,
                                  false,
                                  unpack256,
                                  nullptr,
                                  0,
                                  0,
                                  tile,
                                  nullptr,
                                  dequantize256,
                                  pack_keys_x86,
                                  pack_values_x86,
                                  float_product256};

}  // namespace mrem::runtime
