// Square tiles of [C, C] matrices in shared memory, and products of their rows with vectors of four columns.
#pragma once

#include "ptx.cuh"

// Starts copying the tile at (row, column) of a [C, C] matrix to rows of side + 4 floats; beyond the matrix 0. Visible
// after a wait and a barrier.
template <int Threads>
__device__ __forceinline__ void load_tile(float* tile, const float* matrix, int row, int column, int side, int C) {
    const int quarters = side / 4;
    for (int cell = threadIdx.x; cell < side * quarters; cell += Threads) {
        const int r = cell / quarters, c = cell % quarters * 4;
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
    }
}

__device__ __forceinline__ void add_product(float4& sum, float factor, const float4& x) {
    sum.x = fmaf(factor, x.x, sum.x);
    sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z);
    sum.w = fmaf(factor, x.w, sum.w);
}
