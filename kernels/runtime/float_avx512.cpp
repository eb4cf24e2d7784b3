// The float kernels for AVX-512; CMakeLists.txt gives this file its instructions.
#include "../cpu/simd_avx512.h"
#include "float_impl.h"
#include "lane_sums.h"

namespace mrem::runtime {
namespace {

struct Lanes : Avx512 {
    using I = __m512i;
    using Table = __m512;
    static constexpr int kAtOnce = 4;

    using Avx512::add, Avx512::all, Avx512::load, Avx512::load_first, Avx512::sub;

    static F zero() { return _mm512_setzero_ps(); }
    static F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
    static F fnma(F x, F y, F z) { return _mm512_fnmadd_ps(x, y, z); }  // z − x · y
    // The second operand if one of them is NaN.
    static F min(F x, F y) { return _mm512_min_ps(x, y); }
    static F max(F x, F y) { return _mm512_max_ps(x, y); }
    // The smaller of |x| and y >= 0; y if x is NaN.
    static F magnitude(F x, F y) { return _mm512_range_ps(x, y, 0b1010); }
    static M not_below(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ); }
    static F nan_or_zero(F x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
    static F fill_after(F x, std::size_t n, F beyond) { return _mm512_mask_mov_ps(beyond, first(n), x); }
    static I fill_after(I x, std::size_t n, I beyond) { return _mm512_mask_mov_epi32(beyond, first(n), x); }

    static __m256 lower(F x) { return _mm512_castps512_ps256(x); }
    static __m256 upper(F x) { return _mm512_extractf32x8_ps(x, 1); }
    static float total(F x) { return total_of(_mm256_add_ps(lower(x), upper(x))); }
    static float largest(F x) { return largest_of(_mm256_max_ps(lower(x), upper(x))); }

    static Table table(const float* values) { return _mm512_loadu_ps(values); }
    static F look_up(Table table, I place) {
        return _mm512_permutexvar_ps(place, table);
    }  // its low four bits

    static I all(std::int32_t value) { return _mm512_set1_epi32(value); }
    static I load(const std::int32_t* from) { return _mm512_loadu_si512(from); }
    static I load_first(const std::int32_t* from, std::size_t n) {
        return _mm512_maskz_loadu_epi32(first(n), from);
    }
    static I add(I x, I y) { return _mm512_add_epi32(x, y); }
    static I sub(I x, I y) { return _mm512_sub_epi32(x, y); }
    static I max(I x, I y) { return _mm512_max_epi32(x, y); }
    static std::int32_t largest(I x) {
        return largest_of(_mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
    }
    static I bits(F x) { return _mm512_castps_si512(x); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    // 2^n, n in the low bits of kRounder + n
    static F power_of_two(I n) {
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(n, 23), _mm512_set1_epi32(127 << 23)));
    }
    // x · 2^n, while its exponent stays in range
    static F times_power(F x, I n) {
        return _mm512_castsi512_ps(_mm512_add_epi32(bits(x), _mm512_slli_epi32(n, 23)));
    }
    // Sixteen codes of kBits bits
    template <int kBits>
    static I codes(const std::uint8_t* bytes) {
        if constexpr (kBits == 8) {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
        } else {
            std::int32_t words[2];
            std::memcpy(words, bytes, 2 * kBits);
            const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            I word = all(words[0]);
            if constexpr (kBits == 4) word = _mm512_inserti64x4(word, _mm256_set1_epi32(words[1]), 1);
            const I shift = _mm512_slli_epi32(lane, kBits / 2);  // the processor takes its low bits
            const I low = _mm512_and_si512(shift, all(31));
            return _mm512_and_si512(_mm512_srlv_epi32(word, low), all((1 << kBits) - 1));
        }
    }
    static void store_bytes(I x, std::uint8_t* to) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
    }
};

}  // namespace

const FloatKernels kAvx512Floats = table<Lanes>("avx512");

}  // namespace mrem::runtime
