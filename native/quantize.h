#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace slipstream {

// Few bits a value, and one scale for each block of values.
//
// A packed run of `count` floats is, little-endian: the scales (float), one for every `block` values
// or part of it, then the codes: signed bytes, or for 4 bits two in a byte, the earlier one in its
// low half. With L = 127 or 7, codes are from -L to L, and a code means code * scale.
//
// A block with a NaN or an infinity has the scale +infinity. Its codes are then 0 for finite values, 1
// for a NaN, and L or -L for an infinity.
enum class CodeBits { four = 4, eight = 8 };
constexpr std::size_t kQuantizedUnit = 32;      // a block is a multiple of this,
constexpr std::size_t kQuantizedBlock = 4096;   // and no larger than this
constexpr std::size_t quantized_scales(std::size_t count, std::size_t block) {
    return (count + block - 1) / block * sizeof(float);
}
constexpr std::size_t quantized_nbytes(std::size_t count, CodeBits bits, std::size_t block) {
    const std::size_t codes = bits == CodeBits::eight ? count : (count + 1) / 2;
    return quantized_scales(count, block) + codes;
}

// Packs acc[i] = gradient[i] + residual[i], in float. A block's scale is its largest magnitude / L with
// the mantissa cut to 17 bits, so that code * scale is exact. A code is acc[i] / scale, rounded to
// nearest, ties to even; or with a `seed` up or down at random, the nearer the likelier, by bits that
// the seed, the position and the block's largest magnitude determine. residual[i] becomes
// acc[i] - code * scale, which is also exact if codes are rounded to nearest.
//
// A block whose largest magnitude is below 1e-30 stays in the residual as a whole. In a block with a
// value that is not finite, finite values stay (residual[i] = acc[i]); the others do not change the
// residual.
//
// `residual` may be null: nothing is added, and rounding errors are lost. All kernels write the same
// bytes. Pointers need no alignment; memory must not overlap.
using QuantizePack = void(std::byte* out, const std::byte* gradient, std::byte* residual,
                          std::size_t count, CodeBits bits, std::size_t block,
                          std::optional<std::uint32_t> seed) noexcept;

// out[i] = ((v0[i] + v1[i]) + v2[i] + ...) / divisor, in float, strictly in the order of `inputs`,
// where v are the unpacked inputs; every NaN is the same quiet one. `inputs` must not be empty.
using QuantizeUnpack = void(std::byte* out, std::span<const std::byte* const> inputs,
                            std::size_t count, CodeBits bits, std::size_t block,
                            double divisor) noexcept;

// The portable versions are the fallback of the others.
QuantizePack quantize_pack, quantize_pack_portable;
QuantizeUnpack quantize_unpack, quantize_unpack_portable;

}  // namespace slipstream
