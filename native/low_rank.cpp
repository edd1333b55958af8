#include "low_rank.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "clones.h"

namespace slipstream {
namespace {

constexpr std::size_t kTile = 1024;       // columns processed at a time, in the cache
constexpr std::size_t kLanes = 16;        // of sums along a row
constexpr std::size_t kRowsAtATime = 256; // of sums along a column

// sum[j] += u[0] v[0][j], then u[1] v[1][j], and so on; vectors of v are `v_stride` apart.
SLIPSTREAM_INLINE void add_products(float* __restrict sum, const float* u, std::size_t u_stride,
                                    const float* v, std::size_t v_stride, std::size_t rank,
                                    std::size_t count) {
    std::size_t k = 0;
    for (; k + 4 <= rank; k += 4) {
        const float u0 = u[k * u_stride], u1 = u[(k + 1) * u_stride];
        const float u2 = u[(k + 2) * u_stride], u3 = u[(k + 3) * u_stride];
        const float* __restrict v0 = v + k * v_stride;
        const float* __restrict v1 = v0 + v_stride;
        const float* __restrict v2 = v1 + v_stride;
        const float* __restrict v3 = v2 + v_stride;
        for (std::size_t j = 0; j < count; ++j)
            sum[j] = (((sum[j] + u0 * v0[j]) + u1 * v1[j]) + u2 * v2[j]) + u3 * v3[j];
    }
    for (; k < rank; ++k) {
        const float u0 = u[k * u_stride];
        const float* __restrict v0 = v + k * v_stride;
        for (std::size_t j = 0; j < count; ++j) sum[j] += u0 * v0[j];
    }
}

SLIPSTREAM_INLINE void add(float* __restrict to, const float* __restrict more, std::size_t count) {
    for (std::size_t j = 0; j < count; ++j) to[j] += more[j];
}

// The products of one row with `Vectors` vectors of the basis, `stride` apart.
template <std::size_t Vectors>
SLIPSTREAM_INLINE void dot(float* factor, std::size_t factor_stride, const float* __restrict row,
                           const float* __restrict basis, std::size_t stride, std::size_t count) {
    float lanes[Vectors][kLanes] = {};
    std::size_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
        for (std::size_t k = 0; k < Vectors; ++k)
            for (std::size_t l = 0; l < kLanes; ++l)
                lanes[k][l] += row[j + l] * basis[k * stride + j + l];
    for (std::size_t k = 0; k < Vectors; ++k) {
        for (std::size_t l = 0; j + l < count; ++l)
            lanes[k][l] += row[j + l] * basis[k * stride + j + l];
        float sum = 0;
        for (std::size_t l = 0; l < kLanes; ++l) sum += lanes[k][l];
        factor[k * factor_stride] = sum;
    }
}

// residual[j] -= the products, tile by tile.
SLIPSTREAM_INLINE void subtract_products(float* __restrict residual, const float* u,
                                         std::size_t u_stride, const float* v,
                                         std::size_t v_stride, std::size_t rank,
                                         std::size_t count) {
    float sum[kTile];
    for (std::size_t start = 0; start < count; start += kTile) {
        const std::size_t here = std::min(kTile, count - start);
        std::fill_n(sum, here, 0.0f);
        add_products(sum, u, u_stride, v + start, v_stride, rank, here);
        for (std::size_t j = 0; j < here; ++j) residual[start + j] -= sum[j];
    }
}

SLIPSTREAM_CLONES
void pack_right(float* factor, const float* gradient, float* residual, const float* basis,
                LowRankShape shape) noexcept {
    const auto [rows, columns, rank] = shape;
    for (std::size_t i = 0; i < rows; ++i) {
        float* row = residual + i * columns;
        add(row, gradient + i * columns, columns);
        std::size_t k = 0;
        for (; k + 4 <= rank; k += 4)
            dot<4>(factor + k * rows + i, rows, row, basis + k * columns, columns, columns);
        for (; k < rank; ++k)
            dot<1>(factor + k * rows + i, rows, row, basis + k * columns, columns, columns);
        subtract_products(row, factor + i, rows, basis, columns, rank, columns);
    }
}

SLIPSTREAM_CLONES
void pack_left(float* factor, const float* gradient, float* residual, const float* basis,
               LowRankShape shape) noexcept {
    const auto [rows, columns, rank] = shape;
    std::fill_n(factor, rank * columns, 0.0f);
    float sum[4][kTile];
    for (std::size_t first = 0; first < rows; first += kRowsAtATime) {
        const std::size_t last = std::min(rows, first + kRowsAtATime);
        add(residual + first * columns, gradient + first * columns, (last - first) * columns);
        for (std::size_t start = 0; start < columns; start += kTile) {
            const std::size_t here = std::min(kTile, columns - start);
            for (std::size_t k = 0; k < rank; k += 4) {
                const std::size_t vectors = std::min<std::size_t>(4, rank - k);
                for (std::size_t n = 0; n < vectors; ++n) std::fill_n(sum[n], here, 0.0f);
                for (std::size_t i = first; i < last; ++i) {
                    const float* __restrict row = residual + i * columns + start;
                    for (std::size_t n = 0; n < vectors; ++n) {
                        const float share = basis[(k + n) * rows + i];
                        for (std::size_t j = 0; j < here; ++j) sum[n][j] += share * row[j];
                    }
                }
                for (std::size_t n = 0; n < vectors; ++n)
                    add(factor + (k + n) * columns + start, sum[n], here);
            }
        }
    }
    for (std::size_t i = 0; i < rows; ++i)
        subtract_products(residual + i * columns, basis + i, rows, factor, columns, rank, columns);
}

}  // namespace

void low_rank_pack(float* factor, const float* gradient, float* residual, const float* basis,
                   LowRankShape shape, bool left) noexcept {
    (left ? pack_left : pack_right)(factor, gradient, residual, basis, shape);
}

SLIPSTREAM_CLONES
void low_rank_unpack(float* out, const float* u, const float* v, LowRankShape shape) noexcept {
    const auto [rows, columns, rank] = shape;
    const float nan = std::bit_cast<float>(std::uint32_t{0x7FC00000u});
    for (std::size_t i = 0; i < rows; ++i) {
        float* row = out + i * columns;
        for (std::size_t start = 0; start < columns; start += kTile) {
            const std::size_t here = std::min(kTile, columns - start);
            float* __restrict sum = row + start;
            std::fill_n(sum, here, 0.0f);
            add_products(sum, u + i, rows, v + start, columns, rank, here);
            for (std::size_t j = 0; j < here; ++j) sum[j] = sum[j] == sum[j] ? sum[j] : nan;
        }
    }
}

}  // namespace slipstream
