// The microkernels for the target "avx512vnni": vpdpbusd on 512 bits, sixteen columns by four inputs.
#include <immintrin.h>

#include <utility>

#include "gemm_avx512.h"
#include "pack_x86.h"
#include "unroll.h"

namespace mrem::runtime {
namespace {

// Addresses of R rows from a third as many pointers, four rows from each: no address is spilled, and none is
// computed for a quad.
template <int R>
class Rows {
  public:
    Rows(const std::uint8_t* a, std::size_t stride) : stride_(stride), thrice_(3 * stride) {
        __asm__("" : "+r"(thrice_));
        at_[0] = a;
        MREM_UNROLLED
        for (int i = 1; i < kPointers; ++i) {
            at_[i] = at_[i - 1] + 4 * stride;
            __asm__("" : "+r"(at_[i]));
        }
    }
    __m512i quad(int r, int quads) const {  // of row r, `quads` quads ahead, in all columns
        const std::size_t row = r % 4 == 3 ? thrice_ : static_cast<std::size_t>(r % 4) * stride_;
        std::int32_t four;
        memcpy(&four, at_[r / 4] + row + static_cast<std::size_t>(quads) * kQuad, sizeof four);
        return _mm512_set1_epi32(four);
    }
    void advance(int quads) {
        MREM_UNROLLED
        for (int i = 0; i < kPointers; ++i) at_[i] += static_cast<std::size_t>(quads) * kQuad;
    }

  private:
    static constexpr int kPointers = (R + 3) / 4;
    const std::uint8_t* at_[kPointers];
    std::size_t stride_, thrice_;
};

// The accumulators of R rows by P panels stay in registers; every quad loads P weights and R activations for
// R · P multiplications.
template <int R, int P>
struct Accumulators {
    __m512i acc[R][P];

    void clear() {
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            MREM_UNROLLED
            for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_si512();
        }
    }
    void multiply(const Rows<R>& a, int ahead, const __m512i (&w)[P]) {
        MREM_UNROLLED
        for (int r = 0; r < R; ++r) {
            const __m512i x = a.quad(r, ahead);
            MREM_UNROLLED
            for (int p = 0; p < P; ++p) acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], x, w[p]);
        }
    }
    void store(const Tile& tile) {
        std::int32_t* sums = tile.sums;
        const std::size_t stride = tile.sums_stride;
        if (tile.add) {
            MREM_UNROLLED
            for (int r = 0; r < R; ++r) {
                const std::int32_t* from = sums + static_cast<std::size_t>(r) * stride;
                MREM_UNROLLED
                for (int p = 0; p < P; ++p) {
                    acc[r][p] = _mm512_add_epi32(acc[r][p], _mm512_load_si512(from + p * 16));
                }
            }
        }
        MREM_UNROLLED
        for (int r = 0; r < R; ++r, sums += stride) {
            MREM_UNROLLED
            for (int p = 0; p < P; ++p) _mm512_store_si512(sums + p * 16, acc[r][p]);
        }
    }
};

template <int R, int P>
void tile_of(const Tile& tile) {
    Accumulators<R, P> sums;
    sums.clear();
    Rows<R> a(tile.a, tile.a_stride);
    const std::int8_t* b = tile.b;
    const std::size_t b_stride = tile.b_stride;
    for (std::size_t quad = 0; quad < tile.quads; ++quad, b += kStepBytes) {
        __m512i w[P];
        MREM_UNROLLED
        for (int p = 0; p < P; ++p) w[p] = _mm512_load_si512(b + static_cast<std::size_t>(p) * b_stride);
        sums.multiply(a, 0, w);
        a.advance(1);
    }
    sums.store(tile);
}

// The same with weights that are unpacked on the way: the instructions for this run beside the
// multiplications. `kKeep`: they are stored, too, for the tiles that follow.
template <int R, int P, int kBits, bool kKeep>
void tile_packed(const Tile& tile, const Packed& packed) {
    Accumulators<R, P> sums;
    sums.clear();
    Rows<R> a(tile.a, tile.a_stride);
    constexpr int kFields = 8 / kBits;
    const Fields<kBits> field(packed.coding);
    const std::uint8_t* codes = packed.codes;
    std::int8_t* b = packed.keep;
    for (std::size_t step = tile.quads / kFields; step > 0; --step, codes += kStepBytes) {
        MREM_UNROLLED
        for (int p = 0; p < P; ++p) {
            const std::size_t at = static_cast<std::size_t>(p) * packed.stride + packed.ahead;
            _mm_prefetch(reinterpret_cast<const char*>(codes) + at, _MM_HINT_T0);
        }
        MREM_UNROLLED
        for (int f = 0; f < kFields; ++f) {
            __m512i w[P];
            MREM_UNROLLED
            for (int p = 0; p < P; ++p) {
                w[p] = field(_mm512_loadu_si512(codes + static_cast<std::size_t>(p) * packed.stride), f);
                if (kKeep) _mm512_store_si512(b + static_cast<std::size_t>(p) * tile.b_stride, w[p]);
            }
            if (kKeep) b += kStepBytes;
            sums.multiply(a, f, w);
        }
        a.advance(kFields);
    }
    sums.store(tile);
}

constexpr std::size_t kRows = 12, kPanels = 2;
constexpr std::size_t kLeast = (kRows + 1) / 2;  // rows of a tile that others follow: all are nearly equal

template <class Function>
struct PerRows {
    Function of[kRows];
};

template <int P, std::size_t... I>
constexpr PerRows<void (*)(const Tile&)> plain(std::index_sequence<I...>) {
    return {{tile_of<static_cast<int>(I) + 1, P>...}};
}

using PackedFunction = void (*)(const Tile&, const Packed&);
template <int R, int kBits, bool kKeep>
constexpr PackedFunction packed_of() {
    if constexpr (kKeep && R < static_cast<int>(kLeast)) {
        return nullptr;
    } else {
        return tile_packed<R, kPanels, kBits, kKeep>;
    }
}
template <int kBits, bool kKeep, std::size_t... I>
constexpr PerRows<PackedFunction> packed(std::index_sequence<I...>) {
    return {{packed_of<static_cast<int>(I) + 1, kBits, kKeep>()...}};
}

using All = std::make_index_sequence<kRows>;
constexpr PerRows<void (*)(const Tile&)> kTiles[kPanels] = {plain<1>(All{}), plain<2>(All{})};
constexpr PerRows<PackedFunction> kPackedTiles[3][2] = {{packed<2, false>(All{}), packed<2, true>(All{})},
                                                        {packed<4, false>(All{}), packed<4, true>(All{})},
                                                        {packed<8, false>(All{}), packed<8, true>(All{})}};

void tile(std::size_t rows, std::size_t panels, const Tile& tile) { kTiles[panels - 1].of[rows - 1](tile); }

bool tile_unpacking(std::size_t rows, std::size_t panels, const Tile& tile, const Packed& packed) {
    const auto& by_bits = kPackedTiles[packed.coding.bits == 2 ? 0 : packed.coding.bits == 4 ? 1 : 2];
    const PackedFunction found = by_bits[packed.keep != nullptr].of[rows - 1];
    if (panels != kPanels || found == nullptr) return false;
    found(tile, packed);
    return true;
}

}  // namespace

const GemmKernels kAvx512VnniGemm = {"avx512vnni",
                                     kRows,
                                     kPanels,
                                     192,
                                     1,
                                     false,
                                     unpack512,
                                     nullptr,
                                     0,
                                     0,
                                     tile,
                                     tile_unpacking,
                                     dequantize512,
                                     pack_keys_x86,
                                     pack_values_x86,
                                     float_product512};

}  // namespace mrem::runtime
