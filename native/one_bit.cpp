#include "one_bit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "floats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SLIPSTREAM_AVX2 __attribute__((target("avx2")))
#endif

namespace slipstream {
namespace {

constexpr std::size_t kLanes = 8;

struct Scales {
    float clear;
    float set;

    static Scales of(const std::byte* packed) noexcept { return {read_scale(packed), read_scale(packed + 4)}; }
    void into(std::byte* packed) const noexcept {
        write_scale(packed, clear);
        write_scale(packed + 4, set);
    }
};

// By lane: the two sums. A NaN is added to both.
struct Sums {
    double clear[kLanes] = {};
    double set[kLanes] = {};
    std::size_t set_count = 0;
};

float mean(const double (&lanes)[kLanes], std::size_t count) noexcept {
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return one_nan(static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(count, 1))));
}

// The loops that take the time, over any number of values; a path has all of them.
struct Portable {
    // Bits and sums of gradient + residual.
    static void weigh(std::byte* bits, const std::byte* gradient, const std::byte* residual,
                      std::size_t count, Sums& sums) noexcept {
        for (std::size_t start = 0; start < count; start += kLanes) {
            const std::size_t length = std::min(kLanes, count - start);
            unsigned byte = 0;
            for (std::size_t lane = 0; lane < length; ++lane) {
                const float acc = load(gradient, start + lane) + load(residual, start + lane);
                const double wide = acc;
                sums.set[lane] += 0.0 > wide ? 0.0 : wide;
                sums.clear[lane] += 0.0 < wide ? 0.0 : wide;
                byte |= unsigned{acc >= 0.0f} << lane;
            }
            bits[start / 8] = static_cast<std::byte>(byte);
            sums.set_count += static_cast<std::size_t>(std::popcount(byte));
        }
    }

    // The remainder of gradient + residual after the scales.
    static void keep(const std::byte* gradient, std::byte* residual, std::size_t count,
                     Scales scales) noexcept {
        for (std::size_t i = 0; i < count; ++i) {
            const float acc = load(gradient, i) + load(residual, i);
            const float scale = acc >= 0.0f ? scales.set : scales.clear;
            store(residual, i, acc - scale);
        }
    }

    static void spread(std::byte* out, const std::byte* bits, std::size_t count,
                       Scales scales) noexcept {
        each(bits, count, scales, [=](std::size_t i, float value) { store(out, i, value); });
    }

    static void add(std::byte* out, const std::byte* bits, std::size_t count,
                    Scales scales) noexcept {
        each(bits, count, scales,
             [=](std::size_t i, float value) { store(out, i, load(out, i) + value); });
    }

    static void divide(std::byte* out, std::size_t count, float by) noexcept {
        for (std::size_t i = 0; i < count; ++i) store(out, i, one_nan(load(out, i) / by));
    }

  private:
    // Bits are as good as random, so a branch on them would be mispredicted half of the time.
    template <class Use>
    static void each(const std::byte* bits, std::size_t count, Scales scales, Use use) noexcept {
        const auto clear = std::bit_cast<std::uint32_t>(scales.clear);
        const auto differing = clear ^ std::bit_cast<std::uint32_t>(scales.set);
        const auto value = [=](std::uint32_t byte, std::size_t lane) {
            const std::uint32_t mask = 0u - (byte >> lane & 1u);
            return std::bit_cast<float>(clear ^ (differing & mask));
        };
        const std::size_t whole = count - count % kLanes;
        for (std::size_t start = 0; start < whole; start += kLanes) {
            const auto byte = std::to_integer<std::uint32_t>(bits[start / 8]);
            for (std::size_t lane = 0; lane < kLanes; ++lane) use(start + lane, value(byte, lane));
        }
        for (std::size_t i = whole; i < count; ++i)
            use(i, value(std::to_integer<std::uint32_t>(bits[whole / 8]), i - whole));
    }
};

#if defined(SLIPSTREAM_AVX2)

// Eight values at a time, which is a byte of bits and one value a lane; Portable does the rest.
struct Avx2 {
    SLIPSTREAM_AVX2 static __m256 floats(const std::byte* data, std::size_t index) noexcept {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(data) + index);
    }
    SLIPSTREAM_AVX2 static void put(std::byte* data, std::size_t index, __m256 value) noexcept {
        _mm256_storeu_ps(reinterpret_cast<float*>(data) + index, value);
    }

    // If the second operand is NaN, max and min return it, so that it is added to both sums.
    SLIPSTREAM_AVX2 static void weigh(std::byte* bits, const std::byte* gradient,
                                      const std::byte* residual, std::size_t count,
                                      Sums& sums) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256d zero = _mm256_setzero_pd();
        __m256d set_low = zero, set_high = zero, clear_low = zero, clear_high = zero;
        std::size_t set_count = 0;
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 acc = _mm256_add_ps(floats(gradient, i), floats(residual, i));
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(acc));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(acc, 1));
            set_low = _mm256_add_pd(set_low, _mm256_max_pd(zero, low));
            set_high = _mm256_add_pd(set_high, _mm256_max_pd(zero, high));
            clear_low = _mm256_add_pd(clear_low, _mm256_min_pd(zero, low));
            clear_high = _mm256_add_pd(clear_high, _mm256_min_pd(zero, high));
            const __m256 is_set = _mm256_cmp_ps(acc, _mm256_setzero_ps(), _CMP_GE_OQ);
            const auto byte = static_cast<unsigned>(_mm256_movemask_ps(is_set));
            bits[i / 8] = static_cast<std::byte>(byte);
            set_count += static_cast<std::size_t>(std::popcount(byte));
        }
        _mm256_storeu_pd(sums.set, set_low);
        _mm256_storeu_pd(sums.set + 4, set_high);
        _mm256_storeu_pd(sums.clear, clear_low);
        _mm256_storeu_pd(sums.clear + 4, clear_high);
        sums.set_count = set_count;
        Portable::weigh(bits + whole / 8, gradient + whole * sizeof(float),
                        residual + whole * sizeof(float), count - whole, sums);
    }

    SLIPSTREAM_AVX2 static void keep(const std::byte* gradient, std::byte* residual,
                                     std::size_t count, Scales scales) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 clear = _mm256_set1_ps(scales.clear), set = _mm256_set1_ps(scales.set);
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 acc = _mm256_add_ps(floats(gradient, i), floats(residual, i));
            const __m256 is_set = _mm256_cmp_ps(acc, _mm256_setzero_ps(), _CMP_GE_OQ);
            put(residual, i, _mm256_sub_ps(acc, _mm256_blendv_ps(clear, set, is_set)));
        }
        Portable::keep(gradient + whole * sizeof(float), residual + whole * sizeof(float),
                       count - whole, scales);
    }

    SLIPSTREAM_AVX2 static __m256 chosen(const std::byte* bits, std::size_t i, __m256 clear,
                                         __m256 set) noexcept {
        const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i byte = _mm256_set1_epi32(std::to_integer<int>(bits[i / 8]));
        const __m256i is_set = _mm256_cmpeq_epi32(_mm256_and_si256(byte, places), places);
        return _mm256_blendv_ps(clear, set, _mm256_castsi256_ps(is_set));
    }

    SLIPSTREAM_AVX2 static void spread(std::byte* out, const std::byte* bits, std::size_t count,
                                       Scales scales) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 clear = _mm256_set1_ps(scales.clear), set = _mm256_set1_ps(scales.set);
        for (std::size_t i = 0; i < whole; i += kLanes) put(out, i, chosen(bits, i, clear, set));
        Portable::spread(out + whole * sizeof(float), bits + whole / 8, count - whole, scales);
    }

    SLIPSTREAM_AVX2 static void add(std::byte* out, const std::byte* bits, std::size_t count,
                                    Scales scales) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 clear = _mm256_set1_ps(scales.clear), set = _mm256_set1_ps(scales.set);
        for (std::size_t i = 0; i < whole; i += kLanes)
            put(out, i, _mm256_add_ps(floats(out, i), chosen(bits, i, clear, set)));
        Portable::add(out + whole * sizeof(float), bits + whole / 8, count - whole, scales);
    }

    SLIPSTREAM_AVX2 static void divide(std::byte* out, std::size_t count, float by) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 divisor = _mm256_set1_ps(by), nan = _mm256_set1_ps(one_nan(NAN));
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 value = _mm256_div_ps(floats(out, i), divisor);
            const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
            put(out, i, _mm256_blendv_ps(value, nan, is_nan));
        }
        Portable::divide(out + whole * sizeof(float), count - whole, by);
    }
};

#endif  // SLIPSTREAM_AVX2

template <class Path>
void pack(std::byte* out, const std::byte* gradient, std::byte* residual,
          std::size_t count) noexcept {
    Sums sums;
    Path::weigh(out + kOneBitScales, gradient, residual, count, sums);
    const Scales scales{mean(sums.clear, count - sums.set_count), mean(sums.set, sums.set_count)};
    scales.into(out);
    if (std::isfinite(scales.clear) && std::isfinite(scales.set))
        Path::keep(gradient, residual, count, scales);
}

// Sums of a block stay in the first-level cache. A multiple of 8: blocks begin with a byte.
constexpr std::size_t kBlock = 2048;

template <class Path>
void unpack(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
            double divisor) noexcept {
    const auto by = static_cast<float>(divisor);
    Scales first = Scales::of(inputs[0]);
    // All values of a single input are one of two, so only these two are divided.
    if (inputs.size() == 1) first = {one_nan(first.clear / by), one_nan(first.set / by)};
    for (std::size_t start = 0; start < count; start += kBlock) {
        const std::size_t length = std::min(kBlock, count - start);
        const std::size_t offset = kOneBitScales + start / 8;
        std::byte* const block = out + start * sizeof(float);
        Path::spread(block, inputs[0] + offset, length, first);
        if (inputs.size() == 1) continue;
        for (const std::byte* input : inputs.subspan(1))
            Path::add(block, input + offset, length, Scales::of(input));
        Path::divide(block, length, by);
    }
}

}  // namespace

void one_bit_pack_portable(std::byte* out, const std::byte* gradient, std::byte* residual,
                           std::size_t count) noexcept {
    pack<Portable>(out, gradient, residual, count);
}

void one_bit_unpack_portable(std::byte* out, std::span<const std::byte* const> inputs,
                             std::size_t count, double divisor) noexcept {
    unpack<Portable>(out, inputs, count, divisor);
}

void one_bit_pack(std::byte* out, const std::byte* gradient, std::byte* residual,
                  std::size_t count) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return pack<Avx2>(out, gradient, residual, count);
#endif
    pack<Portable>(out, gradient, residual, count);
}

void one_bit_unpack(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                    double divisor) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return unpack<Avx2>(out, inputs, count, divisor);
#endif
    unpack<Portable>(out, inputs, count, divisor);
}

}  // namespace slipstream
