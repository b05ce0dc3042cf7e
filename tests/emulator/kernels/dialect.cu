// Warp operations, votes, integer atomics and intrinsics one by one, for tests that hold the emulator to the hardware.
//
// Grid    1. Block: 64 threads.
// Reads   x [64]. Writes out [OPERATIONS, 64], counters [6] (which start at 0, 0, 1000, 0, -1, 7).
#include "ptx.cuh"

#define FULL 0xffffffffu

extern "C" __global__ void __launch_bounds__(64) dialect(const int* x, int* out, int* counters) {
    const int thread = threadIdx.x, lane = thread % 32;
    const int value = x[thread];
    int* row = out + thread;
    const auto put = [&](int result) {
        *row = result;
        row += 64;
    };
    put(__shfl_sync(FULL, value, 5));
    put(__shfl_sync(FULL, value, lane + 3, 8));
    put(__shfl_xor_sync(FULL, value, 9));
    put(__shfl_xor_sync(FULL, value, 12, 8));
    put(__shfl_up_sync(FULL, value, 3));
    put(__shfl_up_sync(FULL, value, 3, 8));
    put(__shfl_down_sync(FULL, value, 5));
    put(__shfl_down_sync(FULL, value, 5, 16));
    const long long wide = __shfl_xor_sync(FULL, value * 4294967296ll + thread, 1);
    put(static_cast<int>(wide >> 32) + static_cast<int>(wide));
    put(static_cast<int>(__ballot_sync(FULL, value > 0)));
    put(__any_sync(FULL, value == x[3]));
    put(__all_sync(FULL, value == x[3]));
    put(static_cast<int>(__match_any_sync(FULL, value & 3)));
    put(__reduce_add_sync(FULL, value));
    put(__reduce_min_sync(FULL, value));
    put(__reduce_max_sync(FULL, value));
    put(static_cast<int>(__reduce_max_sync(FULL, static_cast<unsigned>(value))));
    put(static_cast<int>(__reduce_or_sync(FULL, static_cast<unsigned>(value))));
    int half = 0;
    if (lane >= 16) half = __shfl_down_sync(0xffff0000u, value, 2, 16);
    __syncwarp();
    put(half);
    put(__syncthreads_count(value > 0));
    put(__syncthreads_or(value == x[40]));
    put(__syncthreads_and(value == x[40]));
    put(__popc(value) + 100 * __clz(value) + 10000 * __ffs(value));
    put(__float_as_int(__int_as_float(value & 0x3fffffff)));
    put(min(value, 3) + max(value, 3));
    atomicAdd(counters, value);
    atomicMax(counters + 1, value);
    atomicMin(counters + 2, value);
    atomicOr(reinterpret_cast<unsigned*>(counters) + 3, 1u << lane);
    atomicAnd(reinterpret_cast<unsigned*>(counters) + 4, ~(1u << (thread / 2)));
    if (thread == 9) put(atomicCAS(counters + 5, 7, 70) + atomicExch(counters + 5, 71));
}
