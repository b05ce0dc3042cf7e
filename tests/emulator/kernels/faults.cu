// One fault a kernel, each for one check of the emulator.
//
// Grid    2. Block: 64 threads.
// Reads   x [128], which holds 0..127. Writes y [128]. `count` is a counter that starts at 0.
// Shared  dynamic: 256 bytes.
#include "ptx.cuh"

#define FAULT(name) extern "C" __global__ void name(int* x, int* y, int* count, int n)
#define LANE (threadIdx.x % 32)
#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

FAULT(divergent_barrier) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

FAULT(barrier_after_exit) {
    if (threadIdx.x == 5) return;
    __syncthreads();
}

FAULT(lanes_missing) {
    if (LANE < 16) y[INDEX] = __shfl_sync(0xffffffffu, x[INDEX], 0);
}

FAULT(lane_outside_mask) {
    y[INDEX] = __shfl_sync(0xffffu, x[INDEX], 0);
}

FAULT(masks_differ) {
    y[INDEX] = __shfl_sync(LANE < 16 ? 0xffffffffu : 0xffff0000u, x[INDEX], LANE);
}

FAULT(sites_differ) {
    if (LANE < 16)
        y[INDEX] = __shfl_sync(0xffffffffu, x[INDEX], 0);
    else
        y[INDEX] = __shfl_sync(0xffffffffu, x[INDEX], 1);
}

FAULT(lane_ended) {
    if (LANE == 3) return;
    y[INDEX] = __shfl_xor_sync(0xffffffffu, x[INDEX], 1);
}

FAULT(source_outside_mask) {
    if (LANE < 16) y[INDEX] = __shfl_sync(0xffffu, x[INDEX], 20);
}

FAULT(race_of_a_block) {
    int* const s = ptx::dynamic_shared<int>();
    s[threadIdx.x] = x[INDEX];
    __syncwarp();
    y[INDEX] = s[63 - threadIdx.x];
}

FAULT(race_of_a_warp) {
    int* const s = ptx::dynamic_shared<int>();
    s[threadIdx.x] = x[INDEX];
    __syncthreads();
    const int other = s[threadIdx.x ^ 1];
    s[threadIdx.x] = other;
}

FAULT(race_of_blocks) {
    if (threadIdx.x == 0) y[0] = x[INDEX];
}

FAULT(read_across_blocks) {
    if (blockIdx.x == 0)
        y[threadIdx.x] = 1;
    else
        y[INDEX] = y[threadIdx.x];
}

FAULT(atomic_and_plain) {
    if (threadIdx.x == 0)
        *count = 1;
    else
        atomicAdd(count, 1);
}

FAULT(unwritten_shared) {
    __shared__ int s[64];
    if (threadIdx.x != 7) s[threadIdx.x] = x[INDEX];
    __syncthreads();
    y[INDEX] = s[63 - threadIdx.x];
}

FAULT(unwritten_output) {
    y[INDEX] += 1;
}

FAULT(output_partly_written) {
    if (INDEX != 77) y[INDEX] = 1;
}

FAULT(global_bounds) {
    y[INDEX] = x[INDEX + 1];
}

FAULT(shared_bounds) {
    ptx::dynamic_shared<int>()[threadIdx.x + 1] = 1;
}

FAULT(static_shared_bounds) {
    __shared__ int s[2][64];
    s[0][threadIdx.x + n - 127] = 1;
    y[INDEX] = 1;
}

FAULT(local_bounds) {
    int a[4] = {x[0], x[1], x[2], x[3]};
    int* volatile p = a;
    y[INDEX] = p[n - 124];
}

FAULT(misaligned_vector) {
    const uint4 four = ptx::load_global(reinterpret_cast<const uint4*>(x + 1));
    y[INDEX] = four.x;
}

FAULT(misaligned_dereference) {
    const int2 two = *reinterpret_cast<const int2*>(x + 1);
    y[INDEX] = two.y;
}

FAULT(signed_overflow) {
    y[INDEX] = 2147483647 + x[INDEX];
}

FAULT(readonly_of_written) {
    y[INDEX] = 1;
    y[INDEX] = ptx::load_readonly(y + INDEX);
}

FAULT(undeclared_write) {
    x[INDEX] = 1;
}

FAULT(order_of_threads) {
    y[INDEX] = atomicAdd(count, 1);
}

FAULT(copy_not_waited) {
    int* const s = ptx::dynamic_shared<int>();
    ptx::copy_async_4(s + threadIdx.x, x + INDEX);
    ptx::copy_commit();
    y[INDEX] = s[threadIdx.x];
}

FAULT(copy_left_behind) {
    ptx::copy_async_4(ptx::dynamic_shared<int>() + threadIdx.x, x + INDEX);
}

FAULT(mbarrier_not_initialized) {
    __shared__ unsigned long long barrier;
    if (threadIdx.x == 0) barrier = 0;
    __syncthreads();
    ptx::mbarrier_wait(&barrier, 0);
}

FAULT(mbarrier_never_completes) {
    __shared__ unsigned long long barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 65);
    __syncthreads();
    ptx::mbarrier_arrive(&barrier, 0);
    ptx::mbarrier_wait(&barrier, 0);
}

FAULT(cluster_wait_without_arrive) {
    ptx::cluster_wait();
}

// Sound beside a launch that writes neither x nor y.
FAULT(early_read) {
    const int early = x[INDEX];
    ptx::pdl_wait();
    y[INDEX] = early;
}

FAULT(early_write) {
    y[INDEX] = 1;
    ptx::pdl_wait();
}

// y must hold data.
FAULT(early_update) {
    y[INDEX] += 1;
    ptx::pdl_wait();
}

FAULT(early_atomic) {
    if (blockIdx.x == 0) ptx::pdl_wait();
    atomicAdd(count, 1);
    ptx::pdl_wait();
}

FAULT(trigger_after_wait) {
    ptx::pdl_wait();
    ptx::pdl_trigger();
    y[INDEX] = 1;
}

FAULT(trigger_before_wait) {
    ptx::pdl_trigger();
    ptx::pdl_wait();
    y[INDEX] = 1;
}

FAULT(one_block_waits) {
    if (blockIdx.x == 0) ptx::pdl_wait();
}

FAULT(trap) {
    __trap();
}

// No fault: every lane, every byte, in any order.
FAULT(sound) {
    int* const s = ptx::dynamic_shared<int>();
    s[threadIdx.x] = x[INDEX];
    __syncthreads();
    atomicAdd(count, 1);
    const int other = s[63 - threadIdx.x];
    const int half = LANE < 16 ? __shfl_down_sync(0xffffu, other, 8, 16) : __shfl_up_sync(0xffff0000u, other, 8, 16);
    y[INDEX] = half + __popc(__ballot_sync(0xffffffffu, LANE % 3 == 0)) + __syncthreads_count(LANE < 4);
}
