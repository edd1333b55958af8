#pragma once

#include <cstddef>
#include <cstdint>

namespace slipstream {

// The value-bounded filter (Parameter Flow's DVF): values within a bound are kept, others are sent.
//
// A frame of `count` floats is a header of 12 bytes and a body, all little-endian:
//
//   byte 0        form of the body: 1 dense, 2 bitmap, 3 indexes
//   byte 1        format of the values: 1 float32, 2 bfloat16, 3 of 8 bits, 4 of 4 bits
//   byte 2        compression; only 0, none, is decoded here
//   byte 3        0
//   bytes 4 - 7   the number of its values
//   bytes 8 - 11  the bytes of the body before compression
//
//   dense    every value, +0 where it was kept
//   bitmap   the values sent; then the bits, that of value i in byte i / 8 as bit i % 8, set if the
//            value is sent; bits after the last value are clear
//   indexes  the values sent; then for each the number of values between it and the previous one
//            that is sent, as LEB128 of the fewest bytes
//
// Values of few bits are packed in runs of kBoundedBlock, the last one shorter, each as quantize.h has
// it: a scale, then the codes. They are not sent in the dense form.
//
// The form is the smallest of the three and changes no value.
constexpr std::size_t kBoundedHeader = 12;
constexpr std::size_t kBoundedMost = std::size_t{1} << 29;  // values; the header counts in 32 bits

constexpr std::size_t kBoundedBlock = 64;  // values of few bits that share a scale

enum class BoundedValues : std::uint8_t { float32 = 1, bfloat16 = 2, int8 = 3, int4 = 4 };

// The memory in which values are packed. Values of few bits are made from floats in place: one value
// and its scale take more than a float.
constexpr std::size_t bounded_values_room(std::size_t count, BoundedValues values) {
    if (values == BoundedValues::bfloat16) return count * 2;
    return count * 4 + (values == BoundedValues::float32 ? 0 : 4);
}

// The size of the buffer that packing needs; a frame is never larger.
constexpr std::size_t bounded_nbytes(std::size_t count, BoundedValues values) {
    return kBoundedHeader + bounded_values_room(count, values) + (count + 7) / 8;
}

// Packs acc[i] = gradient[i] + residual[i], in float, and returns the size of the frame.
//
// A value is sent if not (|acc| <= delta), so that a NaN is; and of those with |acc| == delta the
// first `ties`. The value sent is acc, or the bfloat16 nearest to it (to even; for a finite one at
// most the largest finite one), or its value in quantize.h's format. residual[i] becomes acc minus the
// value sent, exactly; 0 if it is not finite. For other values residual[i] becomes acc. Every NaN is
// sent as the positive quiet one, so that all kernels write the same bytes.
//
// `out` has bounded_nbytes(count, values), `count` is at most kBoundedMost. Pointers need no
// alignment; memory must not overlap.
using BoundedPack = std::size_t(std::byte* out, const std::byte* gradient, std::byte* residual,
                                std::size_t count, float delta, std::size_t ties,
                                BoundedValues values) noexcept;

// Returns why these bytes are not a frame of `count` floats; null if they are.
const char* bounded_check(const std::byte* frame, std::size_t nbytes, std::size_t count) noexcept;

// Adds every value of the frame that is not zero to its element of `out`, or writes it there and +0
// elsewhere. A NaN is stored as the positive quiet one. So all forms and kernels give the same
// bytes.
//
// If the bytes are no frame of `count` floats, nothing changes; returns bounded_check's answer.
// Memory must not overlap.
using BoundedUnpack = const char*(std::byte* out, const std::byte* frame, std::size_t nbytes,
                                  std::size_t count) noexcept;

// The portable versions are the fallback of the others.
BoundedPack bounded_pack, bounded_pack_portable;
BoundedUnpack bounded_add, bounded_add_portable;
BoundedUnpack bounded_write, bounded_write_portable;

}  // namespace slipstream
