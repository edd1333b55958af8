#include "mean.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "clones.h"

namespace slipstream {
namespace {

// The conversions select by value, not by branch, so that loops over them are vectorised.

struct Float32 {
    using Stored = float;
    using Sum = float;
    SLIPSTREAM_INLINE static float widen(float value) { return value; }
    SLIPSTREAM_INLINE static float narrow(float value) {
        return value == value ? value : std::bit_cast<float>(0x7FC00000u);
    }
};

struct Float64 {
    using Stored = double;
    using Sum = double;
    SLIPSTREAM_INLINE static double widen(double value) { return value; }
    SLIPSTREAM_INLINE static double narrow(double value) {
        return value == value ? value : std::bit_cast<double>(std::uint64_t{0x7FF8} << 48);
    }
};

struct BFloat16 {
    using Stored = std::uint16_t;
    using Sum = float;
    SLIPSTREAM_INLINE static float widen(std::uint16_t stored) {
        return std::bit_cast<float>(std::uint32_t{stored} << 16);
    }
    SLIPSTREAM_INLINE static std::uint16_t narrow(float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<std::uint16_t>(value == value ? rounded : 0x7FC0u);
    }
};

// Ten bits of fraction, exponent bias 15; float has 23 and 127.
struct Float16 {
    using Stored = std::uint16_t;
    using Sum = float;

    SLIPSTREAM_INLINE static float widen(std::uint16_t stored) {
        const std::uint32_t sign = (stored & 0x8000u) << 16;
        const std::uint32_t magnitude = stored & 0x7FFFu;
        const std::uint32_t exponent_shift = (127u - 15u) << 23;
        const std::uint32_t normal = (magnitude << 13) + exponent_shift;
        // Inf and NaN keep an exponent of all ones, so theirs is changed by twice as much.
        const std::uint32_t special = normal + exponent_shift;
        // A subnormal is magnitude * 2^-24: put it in the fraction of 0.5, subtract the 0.5.
        const std::uint32_t half = std::bit_cast<std::uint32_t>(0.5f);
        const std::uint32_t subnormal =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(half + magnitude) - 0.5f);
        const std::uint32_t bits = magnitude < 0x0400u    ? subnormal
                                   : magnitude >= 0x7C00u ? special
                                                          : normal;
        return std::bit_cast<float>(sign | bits);
    }

    SLIPSTREAM_INLINE static std::uint16_t narrow(float value) {
        const auto all = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t sign = (all >> 16) & 0x8000u;
        const std::uint32_t bits = all & 0x7FFFFFFFu;
        const std::uint32_t exponent_shift = (127u - 15u) << 23;
        const std::uint32_t normal = (bits - exponent_shift + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
        // Below 2^-14 the last digit is 2^-24, which is float's own at 0.5: the addition rounds.
        const std::uint32_t half = std::bit_cast<std::uint32_t>(0.5f);
        const std::uint32_t subnormal =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5f) - half;
        const std::uint32_t smallest_normal = std::bit_cast<std::uint32_t>(0x1p-14f);
        const std::uint32_t overflow = std::bit_cast<std::uint32_t>(0x1p16f);
        const std::uint32_t magnitude = bits < smallest_normal ? subnormal
                                        : bits < overflow      ? normal
                                                               : 0x7C00u;
        return static_cast<std::uint16_t>(value == value ? sign | magnitude : 0x7E00u);
    }
};

template <class T>
SLIPSTREAM_INLINE T load(const std::byte* data, std::size_t index) {
    T value;
    std::memcpy(&value, data + index * sizeof(T), sizeof(T));
    return value;
}

template <class T>
SLIPSTREAM_INLINE void store(std::byte* data, std::size_t index, T value) {
    std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

// A double to be converted to a 16-bit format. Rounding to float and then again would round twice, so
// the float is rounded towards zero, and its last bit marks that something was cut off.
SLIPSTREAM_INLINE float to_odd(double sum) {
    const auto nearest = static_cast<float>(sum);
    const double back = nearest;
    const auto bits = std::bit_cast<std::uint32_t>(nearest);
    const bool away = (back > sum && sum > 0) || (back < sum && sum < 0);
    const std::uint32_t odd = (away ? bits - 1u : bits) | 1u;
    return back == sum || sum != sum ? nearest : std::bit_cast<float>(odd);
}

// A sum in the precision from which the format is narrowed.
template <class Out, class Sum>
SLIPSTREAM_INLINE typename Out::Sum cut(Sum sum) {
    if constexpr (std::is_same_v<Sum, double> && sizeof(typename Out::Stored) == 2)
        return to_odd(sum);
    else
        return static_cast<typename Out::Sum>(sum);
}

// Sums of a block stay in the first-level cache, so each input is read from memory once.
constexpr std::size_t kBlock = 2048;

template <class In, class Out>
SLIPSTREAM_INLINE void mean(std::byte* out, std::span<const std::byte* const> inputs,
                            std::size_t count, double divisor) {
    using Read = typename In::Stored;
    using Written = typename Out::Stored;
    using Sum = std::common_type_t<typename In::Sum, typename Out::Sum>;
    alignas(64) Sum sums[kBlock];
    const Sum by = static_cast<Sum>(divisor);
    for (std::size_t start = 0; start < count; start += kBlock) {
        const std::size_t length = std::min(kBlock, count - start);
        const std::size_t offset = start * sizeof(Read);
        for (std::size_t i = 0; i < length; ++i)
            sums[i] = In::widen(load<Read>(inputs[0] + offset, i));
        for (const std::byte* input : inputs.subspan(1))
            for (std::size_t i = 0; i < length; ++i)
                sums[i] += In::widen(load<Read>(input + offset, i));
        std::byte* const block = out + start * sizeof(Written);
        for (std::size_t i = 0; i < length; ++i)
            store<Written>(block, i, Out::narrow(cut<Out>(sums[i] / by)));
    }
}

#define SLIPSTREAM_MEAN(In, Out)                                                              \
    SLIPSTREAM_CLONES void mean_##In##_##Out(std::byte* out,                                  \
                                             std::span<const std::byte* const> inputs,        \
                                             std::size_t count, double divisor) noexcept {    \
        mean<In, Out>(out, inputs, count, divisor);                                           \
    }
#define SLIPSTREAM_MEANS(In)      \
    SLIPSTREAM_MEAN(In, Float32)  \
    SLIPSTREAM_MEAN(In, Float64)  \
    SLIPSTREAM_MEAN(In, BFloat16) \
    SLIPSTREAM_MEAN(In, Float16)

SLIPSTREAM_MEANS(Float32)
SLIPSTREAM_MEANS(Float64)
SLIPSTREAM_MEANS(BFloat16)
SLIPSTREAM_MEANS(Float16)

#define SLIPSTREAM_ROW(In) \
    {mean_##In##_Float32, mean_##In##_Float64, mean_##In##_BFloat16, mean_##In##_Float16}

// In the order of Format.
Mean* const kKernels[4][4] = {SLIPSTREAM_ROW(Float32), SLIPSTREAM_ROW(Float64),
                              SLIPSTREAM_ROW(BFloat16), SLIPSTREAM_ROW(Float16)};

}  // namespace

Mean* mean_kernel(Format in, Format out) noexcept {
    return kKernels[static_cast<int>(in)][static_cast<int>(out)];
}

}  // namespace slipstream
