#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace slipstream {

// Few bits a value, and one scale for each block of values.
//
// A packed run of `count` floats is, little-endian: the scales (float), one for every `block` values
// begun, then the codes: signed bytes, or of 4 bits two in a byte, the earlier one in its low half.
// With L = 127 or 7 codes reach from -L to L, and a code stands for code * scale.
//
// A block with a NaN or an infinity has the scale +infinity. Its codes are then 0 for what is finite,
// 1 for a NaN, and L or -L for an infinity.
enum class CodeBits { four = 4, eight = 8 };
constexpr std::size_t kQuantizedUnit = 32;      // a block is a multiple of it,
constexpr std::size_t kQuantizedBlock = 4096;   // and no larger than this
constexpr std::size_t quantized_scales(std::size_t count, std::size_t block) {
    return (count + block - 1) / block * sizeof(float);
}
constexpr std::size_t quantized_nbytes(std::size_t count, CodeBits bits, std::size_t block) {
    const std::size_t codes = bits == CodeBits::eight ? count : (count + 1) / 2;
    return quantized_scales(count, block) + codes;
}

// Packs acc[i] = gradient[i] + residual[i], in float. A block's scale is its largest magnitude / L with
// the mantissa cut to 17 bits, so that code * scale is exact. A code is acc[i] / scale, rounded: to
// nearest, ties to even; or with a `seed` up or down by chance, the nearer the likelier, from bits that
// the seed, the place and the block's largest magnitude determine. residual[i] becomes
// acc[i] - code * scale, which is exact too where codes are rounded to nearest.
//
// A block whose largest magnitude is below 1e-30 stays in the residual as a whole. In a
// block that is not finite, what is finite stays (residual[i] = acc[i]); what is not leaves the
// residual as it was.
//
// `residual` may be null: nothing is added, and what rounding leaves is lost. All kernels give the
// same bytes. Pointers need no alignment; memory must not overlap.
using QuantizePack = void(std::byte* out, const std::byte* gradient, std::byte* residual,
                          std::size_t count, CodeBits bits, std::size_t block,
                          std::optional<std::uint32_t> seed) noexcept;

// out[i] = ((v0[i] + v1[i]) + v2[i] + ...) / divisor, in float, strictly in the order of `inputs`,
// where v are the inputs unpacked; every NaN is the same quiet one. `inputs` must not be empty.
using QuantizeUnpack = void(std::byte* out, std::span<const std::byte* const> inputs,
                            std::size_t count, CodeBits bits, std::size_t block,
                            double divisor) noexcept;

// The portable ones are what the others fall back to.
QuantizePack quantize_pack, quantize_pack_portable;
QuantizeUnpack quantize_unpack, quantize_unpack_portable;

}  // namespace slipstream
