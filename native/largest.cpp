#include "largest.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "clones.h"

namespace slipstream {
namespace {

// Without its sign a value's bits, taken as an integer, are ordered as the values are: the
// infinity is above all numbers, and NaN above the infinity.
template <class Bits>
SLIPSTREAM_INLINE Bits largest_bits(const std::byte* data, std::size_t count) {
    constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
    Bits top = 0;
    for (std::size_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
        top = std::max(top, static_cast<Bits>(bits & kMagnitude));
    }
    return top;
}

SLIPSTREAM_CLONES std::int16_t largest16(const std::byte* data, std::size_t count) noexcept {
    return largest_bits<std::int16_t>(data, count);
}
SLIPSTREAM_CLONES std::int32_t largest32(const std::byte* data, std::size_t count) noexcept {
    return largest_bits<std::int32_t>(data, count);
}
SLIPSTREAM_CLONES std::int64_t largest64(const std::byte* data, std::size_t count) noexcept {
    return largest_bits<std::int64_t>(data, count);
}

double half(int magnitude) noexcept {
    const int exponent = magnitude >> 10, fraction = magnitude & 0x3FF;
    if (exponent == 31)
        return fraction ? std::numeric_limits<double>::quiet_NaN()
                        : std::numeric_limits<double>::infinity();
    return exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
}

}  // namespace

double largest(Format format, const std::byte* data, std::size_t count) noexcept {
    switch (format) {
        case Format::float32:
            return std::bit_cast<float>(largest32(data, count));
        case Format::float64:
            return std::bit_cast<double>(largest64(data, count));
        case Format::bfloat16:
            return std::bit_cast<float>(std::int32_t{largest16(data, count)} << 16);
        case Format::float16:
            return half(largest16(data, count));
    }
    return 0.0;
}

}  // namespace slipstream
