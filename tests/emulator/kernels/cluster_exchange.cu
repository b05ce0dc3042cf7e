// Each valid element of y is its row's sum without that element of x, 0 beyond the row's length: an exchange
// through the shared memory of a cluster, for the emulator's tests.
//
// Macros  ROWS, rows of a cluster.
// Grid    cluster size * ceil(rows / ROWS). Block: a multiple of 32 threads; a cluster's threads cover a row.
// Reads   x [rows, columns], lengths [rows]. Writes y [rows, columns].
// Shared  dynamic: 8 * cluster size bytes.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    cluster_exchange(const int* x, const int* lengths, int* y, int rows, int columns) {
    __shared__ unsigned long long arrived;
    __shared__ int warp_total[2][8];
    int* const partial = ptx::dynamic_shared<int>();  // [2, cluster size]
    const int size = ptx::cluster_size();
    const int rank = ptx::cluster_rank();
    const int column = rank * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&arrived, size);
        ptx::mbarrier_init_fence();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::pdl_wait();
    for (int i = 0; i < ROWS; ++i) {
        const int row = blockIdx.x / size * ROWS + i;
        if (row >= rows) break;
        const bool valid = column < lengths[row];
        const int value = valid ? x[row * columns + column] : 0;
        int sum = value;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        // Two buffers, by the parity of i: a buffer is written again only after a barrier that its readers passed.
        const int parity = i & 1;
        if (lane == 0) warp_total[parity][warp] = sum;
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < size) {
            int total = 0;
            for (int w = 0; w < warps; ++w) total += warp_total[parity][w];
            *ptx::map_shared(partial + parity * size + rank, threadIdx.x) = total;
            ptx::mbarrier_arrive(&arrived, threadIdx.x);
        }
        ptx::mbarrier_wait(&arrived, parity);
        int total = 0;
        for (int r = 0; r < size; ++r) total += partial[parity * size + r];
        if (column < columns) y[row * columns + column] = valid ? total - value : 0;
    }
}
