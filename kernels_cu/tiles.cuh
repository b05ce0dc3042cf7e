// Square tiles of [C, C] matrices in shared memory, and products of their rows with vectors of four columns.
#pragma once

#include "ptx.cuh"

// Starts copying the lower triangle of the tile at (row, column) of a [C, C] matrix to rows of side + 4 floats, in whole
// groups of four columns; beyond the matrix 0. Visible after a wait and a barrier.
template <int Threads>
__device__ __forceinline__ void load_tile(float* tile, const float* matrix, int row, int column, int side, int C) {
    const auto load = [&](int r, int c) {
        if (row + r < column + c) return;
        const float* const from = matrix + static_cast<long long>(row + r) * C + column + c;
        float* const to = tile + r * (side + 4) + c;
        if (row + r < C && C % 4 == 0 && column + c < C) {
            ptx::copy_async_16(to, from);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (row + r < C && column + c + i < C)
                    ptx::copy_async_4(to + i, from + i);
                else
                    to[i] = 0.0f;
            }
        }
    };
    if (side == 64) {  // no division
        for (int cell = threadIdx.x; cell < 64 * 16; cell += Threads) load(cell / 16, cell % 16 * 4);
    } else {
        const int quarters = side / 4;
        for (int cell = threadIdx.x; cell < side * quarters; cell += Threads)
            load(cell / quarters, cell % quarters * 4);
    }
}

// N columns of a row.
template <int N>
struct __align__(4 * N) Columns {
    float c[N];
};
template <int N>
__device__ __forceinline__ void add_product(Columns<N>& sum, float factor, const Columns<N>& x) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum.c[k] = fmaf(factor, x.c[k], sum.c[k]);
}
__device__ __forceinline__ void add_product(float4& sum, float factor, const float4& x) {
    sum.x = fmaf(factor, x.x, sum.x);
    sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z);
    sum.w = fmaf(factor, x.w, sum.w);
}

template <int N>
__device__ __forceinline__ Columns<N> scaled(const Columns<N>& x, const float* weights, int i) {
    if (weights == nullptr) return x;
    const float weight = weights[i];
    Columns<N> product;
#pragma unroll
    for (int c = 0; c < N; ++c) product.c[c] = weight * x.c[c];
    return product;
}

// Adds two neighbouring rows of tiles times `values`, each times its weight: value j lies Stride parts behind value j - 1.
// The tiles of several matrices lie `matrix` floats apart, their rows `row` floats; a tile has Tile columns. The first row
// reaches its diagonal at column `reach` of the tile; `ends` is 1 where the diagonal counts. Sums over j upwards.
template <int Matrices, int Tile, int Stride, int N>
__device__ __forceinline__ void add_rows(Columns<N> (&sum)[2][2], const float* rows, int matrix, int row,
                                         const Columns<N>* values, const float* weights, int reach, int ends,
                                         int columns) {
    if (reach < 0) return;
    const int full = reach < Tile ? reach & ~3 : Tile;
    for (int j = 0; j < full; j += 4) {
        Columns<N> value[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = scaled(values[(j + k) * Stride], weights, j + k);
#pragma unroll
        for (int m = 0; m < Matrices; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Columns<4> factors = *reinterpret_cast<const Columns<4>*>(rows + m * matrix + r * row + j);
#pragma unroll
                for (int k = 0; k < 4; ++k) add_product(sum[m][r], factors.c[k], value[k]);
            }
    }
    if (reach >= Tile) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        for (int j = full; j < min(reach + r + ends, columns); ++j) {
            const Columns<N> value = scaled(values[j * Stride], weights, j);
#pragma unroll
            for (int m = 0; m < Matrices; ++m) add_product(sum[m][r], rows[m * matrix + r * row + j], value);
        }
}
