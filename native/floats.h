#pragma once

// Floats in raw memory of any alignment, as the packing kernels read and write them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace slipstream {

inline float load(const std::byte* data, std::size_t index) noexcept {
    float value;
    std::memcpy(&value, data + index * sizeof(float), sizeof(float));
    return value;
}

inline void store(std::byte* data, std::size_t index, float value) noexcept {
    std::memcpy(data + index * sizeof(float), &value, sizeof(float));
}

// Returns every NaN as the same quiet one, so that equal input gives equal bytes.
inline float one_nan(float value) noexcept {
    return value == value ? value : std::bit_cast<float>(0x7FC00000u);
}

// Little-endian, as in frames.
inline float read_scale(const std::byte* data) noexcept {
    std::uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= std::to_integer<std::uint32_t>(data[i]) << (8 * i);
    return std::bit_cast<float>(bits);
}

inline void write_scale(std::byte* data, float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (int i = 0; i < 4; ++i) data[i] = static_cast<std::byte>((bits >> (8 * i)) & 0xFF);
}

#if defined(__x86_64__)
inline bool has_avx2() noexcept {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}
#endif

}  // namespace slipstream
