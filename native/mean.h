#pragma once

#include <cstddef>
#include <span>

namespace slipstream {

// out[i] = (((in0[i] + in1[i]) + in2[i]) + ...) / divisor, strictly in the order of `inputs`.
//
// Inputs have one format, `out` has the same or another. Sums are computed in float (double if
// either is float64) and rounded once, to nearest even, when stored. Every NaN is stored as the
// positive quiet NaN, since the payload that survives an addition differs between processors and even
// between compilations. So equal input gives equal bytes everywhere.
//
// `count` is in elements. Pointers need no alignment. `out` may be one of the inputs; any other
// overlap is an error of the caller. `inputs` must not be empty.
using Mean = void(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                  double divisor) noexcept;

enum class Format { float32, float64, bfloat16, float16 };

// Returns the kernel that reads format `in` and writes format `out`.
Mean* mean_kernel(Format in, Format out) noexcept;

}  // namespace slipstream
