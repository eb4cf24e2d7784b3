// The microkernels for the target "avx2". Two forms:
//
// Light weights (2 and 4 bits): vpmaddubsw adds two products in 16 bits, vpaddw adds such sums, and they are
// widened to 32 bits only at the end of a run that was proved to fit (proof.h): two instructions for 32
// products. Heavy operands (8-bit weights, attention): both are widened to 16 bits first, then vpmaddwd.
#include "gemm_avx2.h"

#include "pack_x86.h"
#include "unroll.h"

namespace mrem::runtime {
namespace {

__m256i four_of(const std::uint8_t* a) {
    std::int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm256_set1_epi32(four);
}

void add_to(std::int32_t* sums, __m256i value, bool add) {
    store256(sums, add ? _mm256_add_epi32(value, load256(sums)) : value);
}

// Keeps a compiler from mixing the instructions of several rows, for which there are too few registers.
inline void finish(__m256i* acc) { __asm__ volatile("" : "+x"(acc[0]), "+x"(acc[1])); }

// R rows by sixteen columns in runs. Sums of 32 bits stay in memory: there are sixteen registers.
template <int R>
void tile_in_runs(const Tile& tile) {
    const std::uint8_t* a = tile.a;
    const std::int8_t* b = tile.b;
    const std::uint8_t* run = tile.cuts;
    const std::size_t stride = tile.a_stride;
    const __m256i ones = _mm256_set1_epi16(1);
    bool add = tile.add;
    for (std::size_t left = tile.quads; left > 0; ++run, add = true) {
        __m256i acc[R][2];
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
        const std::uint8_t* end = a + kQuad * *run;
        for (; a != end; a += kQuad, b += kStepBytes) {
            const __m256i w0 = load256(b), w1 = load256(b + 32);
            MREM_UNROLLED
            for (int r = 0; r < R; ++r) {
                const __m256i x = four_of(a + static_cast<std::size_t>(r) * stride);
                acc[r][0] = _mm256_add_epi16(acc[r][0], _mm256_maddubs_epi16(x, w0));
                finish(acc[r]);
                acc[r][1] = _mm256_add_epi16(acc[r][1], _mm256_maddubs_epi16(x, w1));
                finish(acc[r]);
            }
        }
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            std::int32_t* sums = tile.sums + static_cast<std::size_t>(r) * tile.sums_stride;
            add_to(sums, _mm256_madd_epi16(acc[r][0], ones), add);
            add_to(sums + 8, _mm256_madd_epi16(acc[r][1], ones), add);
        }
        left -= *run;
    }
}

// R <= 4 rows by sixteen columns, both operands in 16 bits: inputs 0 and 2 of a quad, then 1 and 3.
template <int R>
void tile_wide(const Tile& tile) {
    const std::uint8_t* a = tile.a;
    const std::int8_t* b = tile.b;
    const std::size_t stride = tile.a_stride;
    const __m256i low = _mm256_set1_epi16(255);
    __m256i acc[R][2];
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (std::size_t quad = 0; quad < tile.quads; ++quad, a += kQuad, b += kStepBytes) {
        const __m256i w0 = load256(b), w1 = load256(b + 32);
        const __m256i even0 = _mm256_srai_epi16(_mm256_slli_epi16(w0, 8), 8), odd0 = _mm256_srai_epi16(w0, 8);
        const __m256i even1 = _mm256_srai_epi16(_mm256_slli_epi16(w1, 8), 8), odd1 = _mm256_srai_epi16(w1, 8);
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            const __m256i x = four_of(a + static_cast<std::size_t>(r) * stride);
            const __m256i even = _mm256_and_si256(x, low), odd = _mm256_srli_epi16(x, 8);
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(even, even0));
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(even, even1));
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(odd, odd0));
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(odd, odd1));
            finish(acc[r]);
        }
    }
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) {
        std::int32_t* sums = tile.sums + static_cast<std::size_t>(r) * tile.sums_stride;
        add_to(sums, acc[r][0], tile.add);
        add_to(sums + 8, acc[r][1], tile.add);
    }
}

using TileFunction = void (*)(const Tile&);
constexpr std::size_t kRows = 6, kWideRows = 4;
constexpr TileFunction kInRuns[kRows] = {tile_in_runs<1>, tile_in_runs<2>, tile_in_runs<3>,
                                         tile_in_runs<4>, tile_in_runs<5>, tile_in_runs<6>};
constexpr TileFunction kWide[kWideRows] = {tile_wide<1>, tile_wide<2>, tile_wide<3>, tile_wide<4>};

void tile(std::size_t rows, std::size_t, const Tile& tile) {
    if (tile.cuts != nullptr) return kInRuns[rows - 1](tile);
    if (rows <= kWideRows) return kWide[rows - 1](tile);
    kWide[2](tile);  // 5 or 6 rows: 3 and the rest
    Tile rest = tile;
    rest.a += 3 * tile.a_stride;
    rest.sums += 3 * tile.sums_stride;
    kWide[rows - 4](rest);
}

}  // namespace

const GemmKernels kAvx2Gemm = {
    "avx2",          kRows,           1, 256, 1, true, unpack256, tile, dequantize256, pack_keys_x86,
    pack_values_x86, float_product256};

}  // namespace mrem::runtime
