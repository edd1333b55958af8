#pragma once

#include <cstddef>

#include "mean.h"

namespace slipstream {

// The largest magnitude of `count` values; 0 of none, infinite if one of them is, NaN if one is.
// `data` needs no alignment. One pass that only reads.
double largest(Format format, const std::byte* data, std::size_t count) noexcept;

}  // namespace slipstream
