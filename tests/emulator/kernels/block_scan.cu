// Inclusive prefix sums of the rows of x up to each row's length, 0 beyond: a block scan for the emulator's tests.
//
// Macros  ROWS, rows of a block.
// Grid    ceil(rows / ROWS). Block: a multiple of 32 threads, at least `columns`.
// Reads   x [rows, columns], lengths [rows]. Writes y [rows, columns].
// Shared  dynamic: 4 * (threads + threads / 32) bytes.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
    block_scan(const int* x, const int* lengths, int* y, int rows, int columns) {
    int* const staged = ptx::dynamic_shared<int>();  // [threads]
    int* const warp_total = staged + blockDim.x;     // [warps]
    const int column = threadIdx.x;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    ptx::pdl_wait();
    for (int row = blockIdx.x * ROWS; row < min(rows, (static_cast<int>(blockIdx.x) + 1) * ROWS); ++row) {
        // Staged from the neighbour's side, so that the scan depends on the barrier.
        const int mirrored = blockDim.x - 1 - column;
        if (mirrored < columns) ptx::copy_async_4(staged + mirrored, x + row * columns + mirrored);
        ptx::copy_commit();
        ptx::copy_wait<0>();
        __syncthreads();
        const bool valid = column < lengths[row];
        int sum = valid ? staged[column] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int earlier = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += earlier;
        }
        if (lane == 31) warp_total[warp] = sum;
        __syncthreads();  // the totals are complete, and the next row may be staged
        for (int w = 0; w < warp; ++w) sum += warp_total[w];
        if (column < columns) y[row * columns + column] = valid ? sum : 0;
    }
}
