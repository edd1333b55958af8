#pragma once

#include <cstddef>

namespace slipstream {

// A matrix of rows x columns floats and its product with `rank` vectors, stored one after the other:
// `basis` has vectors as long as a row, or as long as a column if `left` is true. `factor` gets as
// many vectors, as long as a column (as a row if `left`).
struct LowRankShape {
    std::size_t rows;
    std::size_t columns;
    std::size_t rank;
};

// With A = residual + gradient: factor = A basis^T (A^T basis^T if `left`), and residual becomes A
// minus the result of low_rank_unpack on factor and basis, rounded once.
//
// Sums have an order that does not depend on the processor: along a row, value j in lane j % 16,
// then the lanes in order; along a column, 256 rows at a time, then these sums in order. Pointers
// are aligned to floats; memory must not overlap.
void low_rank_pack(float* factor, const float* gradient, float* residual, const float* basis,
                   LowRankShape shape, bool left) noexcept;

// out[i][j] = ((0 + u0[i] v0[j]) + u1[i] v1[j]) + ..., in float, in the order of the vectors. The
// vectors u are as long as a column, v as a row. A NaN is stored as the positive quiet one.
void low_rank_unpack(float* out, const float* u, const float* v, LowRankShape shape) noexcept;

}  // namespace slipstream
