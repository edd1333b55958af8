#pragma once

#include <cstddef>
#include <span>

namespace slipstream {

// One bit a value, and one scale for each value of the bit (CNTK's 1-bit SGD).
//
// A packed run of `count` floats is, little-endian: the scale of clear bits (float), the scale of
// set bits (float), then the bits, that of value i in byte i / 8 as bit i % 8; bits of no value
// are clear.
constexpr std::size_t kOneBitScales = 2 * sizeof(float);
constexpr std::size_t one_bit_nbytes(std::size_t count) {
    return kOneBitScales + (count + 7) / 8;
}

// Packs acc[i] = gradient[i] + residual[i], in float: the bit is acc[i] >= 0, a bit's scale the mean
// of its acc (0 where there are none), and residual[i] becomes acc[i] - the scale of its bit.
//
// A NaN makes both scales NaN (the positive quiet one), an infinity that of its sign infinite. Such
// a run leaves the residual as it was: it would otherwise never be finite again.
//
// Means are sums in double, value i in lane i % 8, the lanes added in order; so all kernels give
// the same bytes. `count` is in values. Pointers need no alignment; memory must not overlap.
using OneBitPack = void(std::byte* out, const std::byte* gradient, std::byte* residual,
                        std::size_t count) noexcept;

// out[i] = ((v0[i] + v1[i]) + v2[i] + ...) / divisor, in float, strictly in the order of `inputs`,
// where v are the inputs unpacked: what the mean kernel makes of them, NaN included. `inputs` must
// not be empty; memory must not overlap.
using OneBitUnpack = void(std::byte* out, std::span<const std::byte* const> inputs,
                          std::size_t count, double divisor) noexcept;

// The portable ones are what the others fall back to.
OneBitPack one_bit_pack, one_bit_pack_portable;
OneBitUnpack one_bit_unpack, one_bit_unpack_portable;

}  // namespace slipstream
