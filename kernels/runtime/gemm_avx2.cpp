// The microkernels for the target "avx2". Two forms:
//
// Light weights (2 and 4 bits): vpmaddubsw adds two products in 16 bits, vpaddw adds such sums, and they are
// widened to 32 bits only at the end of a run that was proved to fit (proof.h): two instructions for 32
// products. Heavy operands (8-bit weights, attention): both are widened to 16 bits first, into the first
// cache, and vpmaddwd adds two products in 32 bits.
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

// One step: R rows by two registers of eight columns. `rows` has four bytes for each row, `stride` apart.
#define MREM_STEP(multiply, add)                                                \
    MREM_UNROLLED                                                               \
    for (int r = 0; r < R; ++r) {                                               \
        const __m256i x = four_of(rows + static_cast<std::size_t>(r) * stride); \
        acc[r][0] = add(acc[r][0], multiply(x, w0));                            \
        finish(acc[r]);                                                         \
        acc[r][1] = add(acc[r][1], multiply(x, w1));                            \
        finish(acc[r]);                                                         \
    }

template <int R>
inline void step16(__m256i (&acc)[R][2], const std::uint8_t* rows, std::size_t stride, const std::int8_t* b) {
    const __m256i w0 = load256(b), w1 = load256(b + 32);
    MREM_STEP(_mm256_maddubs_epi16, _mm256_add_epi16)
}

template <int R>
inline void step32(__m256i (&acc)[R][2], const std::uint8_t* rows, std::size_t stride,
                   const std::int16_t* b) {
    const __m256i w0 = load256(b), w1 = load256(b + 16);
    MREM_STEP(_mm256_madd_epi16, _mm256_add_epi32)
}
#undef MREM_STEP

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
        for (std::size_t group = *run / kGroup; group > 0; --group) {
            step16<R>(acc, a, stride, b);
            step16<R>(acc, a + kQuad, stride, b + kStepBytes);
            step16<R>(acc, a + 2 * kQuad, stride, b + 2 * kStepBytes);
            step16<R>(acc, a + 3 * kQuad, stride, b + 3 * kStepBytes);
            a += 4 * kQuad, b += 4 * kStepBytes;
        }
        for (std::size_t quad = *run % kGroup; quad > 0; --quad, a += kQuad, b += kStepBytes) {
            step16<R>(acc, a, stride, b);
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

constexpr std::size_t kRows = 6;    // sums of so many rows stay in registers,
constexpr std::size_t kTall = 12;   // and a tile has twice as many
constexpr std::size_t kChunk = 64;  // quads that are widened at a time

// Numbers of 16 bits: of each quad inputs 0 and 2, and then inputs 1 and 3.
constexpr std::size_t kWideQuad = 4 * kPanel;
void widen(const std::int8_t* b, std::size_t quads, std::int16_t* wide) {
    for (std::size_t quad = 0; quad < quads; ++quad, b += kStepBytes, wide += kWideQuad) {
        const __m256i w0 = load256(b), w1 = load256(b + 32);
        store256(wide, _mm256_srai_epi16(_mm256_slli_epi16(w0, 8), 8));
        store256(wide + kPanel, _mm256_srai_epi16(_mm256_slli_epi16(w1, 8), 8));
        store256(wide + 2 * kPanel, _mm256_srai_epi16(w0, 8));
        store256(wide + 3 * kPanel, _mm256_srai_epi16(w1, 8));
    }
}

// The same of the left operand, row by row. Four bytes of each of several rows are read at a time: without
// the padding they would be in the same bank of the cache, which takes a cycle for each.
constexpr std::size_t kWideRow = kChunk * kQuad + 32;
struct WideRows {
    alignas(32) std::uint8_t a[kTall][2][kWideRow];

    void take(const std::uint8_t* from, std::size_t quads, std::size_t row) {
        const __m256i low = _mm256_set1_epi16(255);
        for (std::size_t i = 0; i < quads * kQuad; i += 32) {
            const __m256i x = loadu256(from + i);
            store256(a[row][0] + i, _mm256_and_si256(x, low));
            store256(a[row][1] + i, _mm256_srli_epi16(x, 8));
        }
    }
};

template <int R>
void tile_wide(const WideRows& rows, std::size_t row, const std::int16_t* b, std::size_t quads,
               std::int32_t* sums, std::size_t sums_stride, bool add) {
    constexpr std::size_t kStride = sizeof rows.a[0];
    __m256i acc[R][2];
    MREM_UNROLLED
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    const std::uint8_t* a = rows.a[row][0];
    for (std::size_t quad = 0; quad < quads; ++quad, a += kQuad, b += kWideQuad) {
        step32<R>(acc, a, kStride, b);
        step32<R>(acc, a + kWideRow, kStride, b + 2 * kPanel);
    }
    MREM_UNROLLED
    for (int r = 0; r < R; ++r, sums += sums_stride) {
        add_to(sums, acc[r][0], add);
        add_to(sums + 8, acc[r][1], add);
    }
}

using InRuns = void (*)(const Tile&);
using Widened = void (*)(const WideRows&, std::size_t, const std::int16_t*, std::size_t, std::int32_t*,
                         std::size_t, bool);
constexpr InRuns kInRuns[kRows] = {tile_in_runs<1>, tile_in_runs<2>, tile_in_runs<3>,
                                   tile_in_runs<4>, tile_in_runs<5>, tile_in_runs<6>};
constexpr Widened kWidened[kRows] = {tile_wide<1>, tile_wide<2>, tile_wide<3>,
                                     tile_wide<4>, tile_wide<5>, tile_wide<6>};

void tile_in_16_bits(std::size_t rows, std::size_t panels, const Tile& tile) {
    const std::size_t upper = rows > kRows ? (rows + 1) / 2 : rows, lower = rows - upper;
    WideRows wide;
    alignas(32) std::int16_t made[kChunk * kWideQuad];
    for (std::size_t first = 0; first < tile.quads; first += kChunk) {
        const std::size_t left = tile.quads - first, quads = left < kChunk ? left : kChunk;
        const bool add = tile.add || first > 0;
        for (std::size_t row = 0; row < rows; ++row) {
            wide.take(tile.a + row * tile.a_stride + first * kQuad, quads, row);
        }
        for (std::size_t panel = 0; panel < panels; ++panel) {
            const std::size_t at = panel * tile.b_stride + first * kStepBytes;
            if (tile.wide == nullptr) widen(tile.b + at, quads, made);
            const std::int16_t* b = tile.wide != nullptr ? tile.wide + at : made;
            std::int32_t* sums = tile.sums + panel * kPanel;
            kWidened[upper - 1](wide, 0, b, quads, sums, tile.sums_stride, add);
            if (lower > 0) {
                kWidened[lower - 1](wide, upper, b, quads, sums + upper * tile.sums_stride, tile.sums_stride,
                                    add);
            }
        }
    }
}

void tile(std::size_t rows, std::size_t panels, const Tile& tile) {
    if (tile.cuts == nullptr) return tile_in_16_bits(rows, panels, tile);
    const std::size_t upper = rows > kRows ? (rows + 1) / 2 : rows, lower = rows - upper;
    kInRuns[upper - 1](tile);
    if (lower == 0) return;
    Tile rest = tile;
    rest.a += upper * tile.a_stride;
    rest.sums += upper * tile.sums_stride;
    kInRuns[lower - 1](rest);
}

}  // namespace

const GemmKernels kAvx2Gemm = {"avx2",
                               kTall,
                               1,
                               256,
                               1,
                               true,
                               unpack256,
                               widen,
                               4,
                               kChunk,
                               tile,
                               nullptr,
                               dequantize256,
                               pack_keys_x86,
                               pack_values_x86,
                               float_product256};

}  // namespace mrem::runtime
