#pragma once

#include <cstddef>
#include <span>

namespace slipstream {

// One bit a value, and one scale for each value of the bit (CNTK's 1-bit SGD).
//
// A packed run of `count` floats is, little-endian: the scale of clear bits (float), the scale of
// set bits (float), then the bits, that of value i in byte i / 8 as bit i % 8; bits after the last
// value are clear.
constexpr std::size_t kOneBitScales = 2 * sizeof(float);
constexpr std::size_t one_bit_nbytes(std::size_t count) {
    return kOneBitScales + (count + 7) / 8;
}

// Packs acc[i] = gradient[i] + residual[i], in float: the bit is acc[i] >= 0, the scale of a bit the
// mean of its acc (0 if there are none), and residual[i] becomes acc[i] - the scale of its bit.
//
// A NaN makes both scales NaN (the positive quiet one), an infinity makes that of its sign infinite.
// Such a run does not change the residual, which would otherwise never be finite again.
//
// Means are sums in double, value i in lane i % 8, the lanes added in order; so all kernels give
// the same bytes. `count` is in values. Pointers need no alignment; memory must not overlap.
using OneBitPack = void(std::byte* out, const std::byte* gradient, std::byte* residual,
                        std::size_t count) noexcept;

// out[i] = ((v0[i] + v1[i]) + v2[i] + ...) / divisor, in float, strictly in the order of `inputs`,
// where v are the unpacked inputs: the result of the mean kernel on them, NaN included. `inputs` must
// not be empty; memory must not overlap.
using OneBitUnpack = void(std::byte* out, std::span<const std::byte* const> inputs,
                          std::size_t count, double divisor) noexcept;

// The portable versions are the fallback of the others.
OneBitPack one_bit_pack, one_bit_pack_portable;
OneBitUnpack one_bit_unpack, one_bit_unpack_portable;

}  // namespace slipstream
