// The float kernels for AVX2 with FMA; CMakeLists.txt gives this file its instructions.
#include "../cpu/simd_avx2.h"
#include "float_impl.h"
#include "lane_sums.h"

namespace mrem::runtime {
namespace {

struct Lanes : Avx2 {
    struct I {
        __m256i a, b;
    };
    using Table = F;
    static constexpr int kAtOnce = 1;  // two registers

    using Avx2::add, Avx2::all, Avx2::load, Avx2::load_first, Avx2::sub;

    static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
    static F fnma(F x, F y, F z) {  // z − x · y
        return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
    }
    // The second operand if one of them is NaN.
    static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
    static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
    // The smaller of |x| and y >= 0; y if x is NaN.
    static F magnitude(F x, F y) { return min(abs(x), y); }
    static M not_below(F x, F y) {
        return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)};
    }
    static F nan_or_zero(F x) {
        return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
                _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
    }
    static F fill_after(F x, std::size_t n, F beyond) {
        const M kept = {_mm256_castsi256_ps(first(in_a(n))), _mm256_castsi256_ps(first(in_b(n)))};
        return where(kept, x, beyond);
    }

    static I fill_after(I x, std::size_t n, I beyond) {
        return {_mm256_blendv_epi8(beyond.a, x.a, first(in_a(n))),
                _mm256_blendv_epi8(beyond.b, x.b, first(in_b(n)))};
    }

    static float total(F x) { return total_of(_mm256_add_ps(x.a, x.b)); }
    static float largest(F x) { return largest_of(_mm256_max_ps(x.a, x.b)); }

    // Eight values in each register; bit 3 of a place chooses the register.
    static Table table(const float* values) { return load(values); }
    static F look_up(const Table& table, I place) {
        return {look_up(table, place.a), look_up(table, place.b)};
    }
    static __m256 look_up(const Table& table, __m256i place) {
        const __m256 low = _mm256_permutevar8x32_ps(table.a, place);
        const __m256 high = _mm256_permutevar8x32_ps(table.b, place);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(place, 28)));
    }

    static I all(std::int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
    static I load(const std::int32_t* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kHalf))};
    }
    static I load_first(const std::int32_t* from, std::size_t n) {
        const __m256i rest =
            in_b(n) == 0 ? _mm256_setzero_si256() : _mm256_maskload_epi32(from + kHalf, first(in_b(n)));
        return {_mm256_maskload_epi32(from, first(in_a(n))), rest};
    }
    static I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    static I sub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
    static I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
    static std::int32_t largest(I x) { return largest_of(_mm256_max_epi32(x.a, x.b)); }
    static I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
    static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    // 2^n, n in the low bits of kRounder + n
    static F power_of_two(I n) {
        const __m256i bias = _mm256_set1_epi32(127 << 23);
        return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(n.a, 23), bias)),
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(n.b, 23), bias))};
    }
    // x · 2^n, while its exponent stays in range
    static F times_power(F x, I n) {
        return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), _mm256_slli_epi32(n.a, 23))),
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), _mm256_slli_epi32(n.b, 23)))};
    }
    // Sixteen codes of kBits bits
    template <int kBits>
    static I codes(const std::uint8_t* bytes) {
        if constexpr (kBits == 8) {
            const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
            return {_mm256_cvtepu8_epi32(sixteen), _mm256_cvtepu8_epi32(_mm_srli_si128(sixteen, 8))};
        } else {
            std::int32_t words[2];
            std::memcpy(words, bytes, 2 * kBits);
            const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1), step = _mm256_set1_epi32(kBits);
            const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i shift = _mm256_mullo_epi32(lane, step);
            const __m256i a = _mm256_srlv_epi32(_mm256_set1_epi32(words[0]), shift);
            const __m256i b = kBits == 4 ? _mm256_srlv_epi32(_mm256_set1_epi32(words[1]), shift)
                                         : _mm256_srlv_epi32(_mm256_set1_epi32(words[0] >> 16), shift);
            return {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
        }
    }
    static void store_bytes(I x, std::uint8_t* to) {
        // The low byte of every lane, first within 128 bits, then four such groups side by side.
        const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                             4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
        const __m256i a = _mm256_shuffle_epi8(x.a, low), b = _mm256_shuffle_epi8(x.b, low);
        const __m256i pairs =
            _mm256_unpacklo_epi32(a, b);  // a0–3 b0–3 in the lower, a4–7 b4–7 in the upper half
        const __m128i lower = _mm256_castsi256_si128(pairs), upper = _mm256_extracti128_si256(pairs, 1);
        const __m128i sorted = _mm_unpacklo_epi32(lower, upper);  // a0–3 a4–7 b0–3 b4–7
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sorted);
    }
};

}  // namespace

const FloatKernels kAvx2Floats = table<Lanes>("avx2");

}  // namespace mrem::runtime
