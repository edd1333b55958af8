#include "quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "floats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SLIPSTREAM_AVX2 __attribute__((target("avx2")))
#endif

namespace slipstream {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr float kSmallest = 1e-30f;  // below, a scale and its inverse lose their precision
constexpr float kUnit = 0x1p-24f;

// 17 bits of the mantissa: times a code of 7 bits, that is a float exactly.
float shortened(float scale) noexcept {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) & ~0x7Fu);
}

// A bijection of 32-bit numbers whose output looks random.
std::uint32_t scatter(std::uint32_t x) noexcept {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

template <CodeBits Bits>
constexpr int kMost = Bits == CodeBits::eight ? 127 : 7;

template <CodeBits Bits>
void put_code(std::byte* codes, std::size_t i, int code) noexcept {
    if constexpr (Bits == CodeBits::eight) {
        codes[i] = static_cast<std::byte>(code);
    } else {
        const auto half = static_cast<std::byte>(code & 15);
        // The earlier one of a byte is written first, and clears the other half.
        codes[i / 2] = i % 2 == 0 ? half : codes[i / 2] | (half << 4);
    }
}

template <CodeBits Bits>
int code_at(const std::byte* codes, std::size_t i) noexcept {
    if constexpr (Bits == CodeBits::eight) return static_cast<std::int8_t>(codes[i]);
    const int half = std::to_integer<int>(codes[i / 2]) >> (i % 2 == 0 ? 0 : 4) & 15;
    return (half ^ 8) - 8;
}

float special(int code) noexcept {
    if (code == 0) return 0.0f;
    if (code == 1) return one_nan(NAN);
    return code > 0 ? std::numeric_limits<float>::infinity()
                    : -std::numeric_limits<float>::infinity();
}

// The rounding of a block: acc * inverse becomes a code, and code * scale is received.
struct Rounding {
    float inverse;
    float scale;
    std::uint32_t key;  // of this block, for random rounding
};

// The loops that take the time, over any number of values; a path has all of them.
struct Portable {
    // acc = gradient + residual; returns the largest magnitude as bits, which have the same order.
    static std::uint32_t add(float* acc, const std::byte* gradient, const std::byte* residual,
                             std::size_t count) noexcept {
        std::uint32_t largest = 0;
        for (std::size_t i = 0; i < count; ++i) {
            acc[i] = load(gradient, i) + (residual == nullptr ? 0.0f : load(residual, i));
            largest = std::max(largest, std::bit_cast<std::uint32_t>(acc[i]) & kMagnitude);
        }
        return largest;
    }

    template <CodeBits Bits, bool Chance>
    static void round(std::byte* codes, const float* acc, std::byte* residual, std::size_t count,
                      Rounding how, std::size_t first = 0) noexcept {
        constexpr auto most = static_cast<float>(kMost<Bits>);
        for (std::size_t i = first; i < count; ++i) {
            float scaled = acc[i] * how.inverse;
            if constexpr (Chance) {
                const std::uint32_t drawn = scatter(how.key + static_cast<std::uint32_t>(i));
                scaled = std::floor(scaled + static_cast<float>(drawn >> 8) * kUnit);
                scaled = std::min(std::max(scaled, -most), most);
            } else {
                scaled = std::nearbyint(scaled);
            }
            put_code<Bits>(codes, i, static_cast<int>(scaled));
            if (residual != nullptr) store(residual, i, acc[i] - scaled * how.scale);
        }
    }

    template <CodeBits Bits, bool Adds>
    static void spread(std::byte* out, const std::byte* codes, std::size_t count, float scale,
                       std::size_t first = 0) noexcept {
        for (std::size_t i = first; i < count; ++i) {
            const float value = static_cast<float>(code_at<Bits>(codes, i)) * scale;
            store(out, i, Adds ? load(out, i) + value : value);
        }
    }

    static void divide(std::byte* out, std::size_t count, float by,
                       std::size_t first = 0) noexcept {
        for (std::size_t i = first; i < count; ++i) store(out, i, one_nan(load(out, i) / by));
    }
};

#if defined(SLIPSTREAM_AVX2)

struct Avx2 {
    static constexpr std::size_t kLanes = 8;

    SLIPSTREAM_AVX2 static __m256 floats(const std::byte* data, std::size_t i) noexcept {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(data) + i);
    }
    SLIPSTREAM_AVX2 static void put(std::byte* data, std::size_t i, __m256 value) noexcept {
        _mm256_storeu_ps(reinterpret_cast<float*>(data) + i, value);
    }

    SLIPSTREAM_AVX2 static std::uint32_t add(float* acc, const std::byte* gradient,
                                             const std::byte* residual,
                                             std::size_t count) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
        __m256i largest = _mm256_setzero_si256();
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 kept = residual == nullptr ? _mm256_setzero_ps() : floats(residual, i);
            const __m256 sum = _mm256_add_ps(floats(gradient, i), kept);
            _mm256_storeu_ps(acc + i, sum);
            largest = _mm256_max_epi32(
                largest, _mm256_and_si256(_mm256_castps_si256(sum), magnitude));
        }
        std::uint32_t lanes[kLanes];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), largest);
        const std::size_t offset = whole * sizeof(float);
        const std::uint32_t rest =
            Portable::add(acc + whole, gradient + offset,
                          residual == nullptr ? nullptr : residual + offset, count - whole);
        return std::max(rest, *std::max_element(lanes, lanes + kLanes));
    }

    SLIPSTREAM_AVX2 static __m256 chance(std::uint32_t key, std::size_t i) noexcept {
        __m256i x = _mm256_add_epi32(
            _mm256_set1_epi32(static_cast<int>(key + static_cast<std::uint32_t>(i))),
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
        x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7FEB352D));
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
        x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x846CA68Bu)));
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 8)), _mm256_set1_ps(kUnit));
    }

    // The codes of eight values, and the remainders.
    template <CodeBits Bits, bool Chance>
    SLIPSTREAM_AVX2 static __m256i codes_of(const float* acc, std::byte* residual, std::size_t i,
                                            Rounding how) noexcept {
        const __m256 value = _mm256_loadu_ps(acc + i);
        __m256 scaled = _mm256_mul_ps(value, _mm256_set1_ps(how.inverse));
        if constexpr (Chance) {
            const __m256 most = _mm256_set1_ps(static_cast<float>(kMost<Bits>));
            const __m256 least = _mm256_set1_ps(-static_cast<float>(kMost<Bits>));
            scaled = _mm256_floor_ps(_mm256_add_ps(scaled, chance(how.key, i)));
            scaled = _mm256_min_ps(_mm256_max_ps(scaled, least), most);
        } else {
            scaled = _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        }
        if (residual != nullptr) {
            const __m256 sent = _mm256_mul_ps(scaled, _mm256_set1_ps(how.scale));
            put(residual, i, _mm256_sub_ps(value, sent));
        }
        return _mm256_cvttps_epi32(scaled);
    }

    template <CodeBits Bits, bool Chance>
    SLIPSTREAM_AVX2 static void round(std::byte* codes, const float* acc, std::byte* residual,
                                      std::size_t count, Rounding how) noexcept {
        const std::size_t whole = count - count % kQuantizedUnit;
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (std::size_t i = 0; i < whole; i += kQuantizedUnit) {
            const __m256i first = codes_of<Bits, Chance>(acc, residual, i, how);
            const __m256i second = codes_of<Bits, Chance>(acc, residual, i + 8, how);
            const __m256i third = codes_of<Bits, Chance>(acc, residual, i + 16, how);
            const __m256i fourth = codes_of<Bits, Chance>(acc, residual, i + 24, how);
            // Packing works in halves of the registers: afterwards fours are in another order.
            const __m256i bytes = _mm256_permutevar8x32_epi32(
                _mm256_packs_epi16(_mm256_packs_epi32(first, second),
                                   _mm256_packs_epi32(third, fourth)),
                order);
            if constexpr (Bits == CodeBits::eight) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
            } else {
                const __m256i halves = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
                const __m256i pairs =
                    _mm256_maddubs_epi16(halves, _mm256_set1_epi16(0x1001));  // low + 16 high
                const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                                        _mm256_extracti128_si256(pairs, 1));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i / 2), packed);
            }
        }
        Portable::round<Bits, Chance>(codes, acc, residual, count, how, whole);
    }

    template <bool Adds>
    SLIPSTREAM_AVX2 static void spread_eight(std::byte* out, std::size_t i, __m128i codes,
                                             __m256 scale) noexcept {
        const __m256 value =
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale);
        put(out, i, Adds ? _mm256_add_ps(floats(out, i), value) : value);
    }

    template <CodeBits Bits, bool Adds>
    SLIPSTREAM_AVX2 static void spread(std::byte* out, const std::byte* codes, std::size_t count,
                                       float by) noexcept {
        const std::size_t whole = count - count % kQuantizedUnit;
        const __m256 scale = _mm256_set1_ps(by);
        const __m128i half = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
        for (std::size_t i = 0; i < whole; i += kQuantizedUnit) {
            __m128i low, high;  // sixteen codes each
            if constexpr (Bits == CodeBits::eight) {
                low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
                high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i + 16));
            } else {
                const __m128i both =
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
                const __m128i even = _mm_and_si128(both, half);
                const __m128i odd = _mm_and_si128(_mm_srli_epi16(both, 4), half);
                low = _mm_unpacklo_epi8(even, odd);
                high = _mm_unpackhi_epi8(even, odd);
                low = _mm_sub_epi8(_mm_xor_si128(low, sign), sign);
                high = _mm_sub_epi8(_mm_xor_si128(high, sign), sign);
            }
            spread_eight<Adds>(out, i, low, scale);
            spread_eight<Adds>(out, i + 8, _mm_srli_si128(low, 8), scale);
            spread_eight<Adds>(out, i + 16, high, scale);
            spread_eight<Adds>(out, i + 24, _mm_srli_si128(high, 8), scale);
        }
        Portable::spread<Bits, Adds>(out, codes, count, by, whole);
    }

    SLIPSTREAM_AVX2 static void divide(std::byte* out, std::size_t count, float by) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 divisor = _mm256_set1_ps(by), nan = _mm256_set1_ps(one_nan(NAN));
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 value = _mm256_div_ps(floats(out, i), divisor);
            const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
            put(out, i, _mm256_blendv_ps(value, nan, is_nan));
        }
        Portable::divide(out, count, by, whole);
    }
};

#endif  // SLIPSTREAM_AVX2

// A block that is not finite: its finite values stay in the residual.
template <CodeBits Bits>
void pack_special(std::byte* codes, const float* acc, std::byte* residual,
                  std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        const bool stays = std::isfinite(acc[i]);
        const int infinite = acc[i] > 0 ? kMost<Bits> : -kMost<Bits>;
        put_code<Bits>(codes, i, stays ? 0 : acc[i] != acc[i] ? 1 : infinite);
        if (stays && residual != nullptr) store(residual, i, acc[i]);
    }
}

template <class Path, CodeBits Bits>
void pack(std::byte* out, const std::byte* gradient, std::byte* residual, std::size_t count,
          std::size_t block, std::optional<std::uint32_t> seed) noexcept {
    constexpr auto most = static_cast<float>(kMost<Bits>);
    std::byte* const all_codes = out + quantized_scales(count, block);
    alignas(32) float acc[kQuantizedBlock];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t length = std::min(block, count - start);
        const std::size_t offset = start * sizeof(float);
        std::byte* const codes = all_codes + (Bits == CodeBits::eight ? start : start / 2);
        std::byte* const kept = residual == nullptr ? nullptr : residual + offset;
        const std::uint32_t bits = Path::add(acc, gradient + offset, kept, length);
        const auto largest = std::bit_cast<float>(bits);
        const bool is_finite = bits < kInfinity;
        // Too small to divide by: codes are 0, and all values stay in the residual.
        const bool is_tiny = is_finite && largest < kSmallest;
        const float scale = !is_finite ? std::numeric_limits<float>::infinity()
                            : is_tiny  ? 0.0f
                                       : shortened(largest / most);
        const auto index = static_cast<std::uint32_t>(start / block);
        write_scale(out + index * sizeof(float), scale);
        if (!is_finite) {
            pack_special<Bits>(codes, acc, kept, length);
            continue;
        }
        const std::uint32_t key = scatter(scatter(seed.value_or(0) ^ bits) + index);
        const Rounding how{is_tiny ? 0.0f : 1.0f / scale, scale, key};
        if (seed && !is_tiny)
            Path::template round<Bits, true>(codes, acc, kept, length, how);
        else
            Path::template round<Bits, false>(codes, acc, kept, length, how);
    }
}

template <CodeBits Bits>
void spread_special(std::byte* out, const std::byte* codes, std::size_t count,
                    bool adds) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        const float value = special(code_at<Bits>(codes, i));
        store(out, i, adds ? load(out, i) + value : value);
    }
}

template <class Path, CodeBits Bits>
void unpack(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
            std::size_t block, double divisor) noexcept {
    const auto by = static_cast<float>(divisor);
    const std::size_t scales = quantized_scales(count, block);
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t length = std::min(block, count - start);
        std::byte* const target = out + start * sizeof(float);
        const std::size_t place = scales + (Bits == CodeBits::eight ? start : start / 2);
        for (const std::byte* const& input : inputs) {
            const bool adds = &input != inputs.data();
            const float scale = read_scale(input + start / block * sizeof(float));
            if (!std::isfinite(scale))
                spread_special<Bits>(target, input + place, length, adds);
            else if (adds)
                Path::template spread<Bits, true>(target, input + place, length, scale);
            else
                Path::template spread<Bits, false>(target, input + place, length, scale);
        }
        if (inputs.size() > 1 || by != 1.0f) Path::divide(target, length, by);
    }
}

template <class Path>
void pack_as(std::byte* out, const std::byte* gradient, std::byte* residual, std::size_t count,
             CodeBits bits, std::size_t block, std::optional<std::uint32_t> seed) noexcept {
    if (bits == CodeBits::eight)
        pack<Path, CodeBits::eight>(out, gradient, residual, count, block, seed);
    else
        pack<Path, CodeBits::four>(out, gradient, residual, count, block, seed);
}

template <class Path>
void unpack_as(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
               CodeBits bits, std::size_t block, double divisor) noexcept {
    if (bits == CodeBits::eight)
        unpack<Path, CodeBits::eight>(out, inputs, count, block, divisor);
    else
        unpack<Path, CodeBits::four>(out, inputs, count, block, divisor);
}

}  // namespace

void quantize_pack_portable(std::byte* out, const std::byte* gradient, std::byte* residual,
                            std::size_t count, CodeBits bits, std::size_t block,
                            std::optional<std::uint32_t> seed) noexcept {
    pack_as<Portable>(out, gradient, residual, count, bits, block, seed);
}

void quantize_unpack_portable(std::byte* out, std::span<const std::byte* const> inputs,
                              std::size_t count, CodeBits bits, std::size_t block,
                              double divisor) noexcept {
    unpack_as<Portable>(out, inputs, count, bits, block, divisor);
}

void quantize_pack(std::byte* out, const std::byte* gradient, std::byte* residual,
                   std::size_t count, CodeBits bits, std::size_t block,
                   std::optional<std::uint32_t> seed) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return pack_as<Avx2>(out, gradient, residual, count, bits, block, seed);
#endif
    pack_as<Portable>(out, gradient, residual, count, bits, block, seed);
}

void quantize_unpack(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                     CodeBits bits, std::size_t block, double divisor) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return unpack_as<Avx2>(out, inputs, count, bits, block, divisor);
#endif
    unpack_as<Portable>(out, inputs, count, bits, block, divisor);
}

}  // namespace slipstream
