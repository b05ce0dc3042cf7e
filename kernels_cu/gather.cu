// Reads the bank at the start of a step: what the write keys retrieve and what the read keys see.
//
//     residual[i] = v[i] - sum_n k_eff[i, n] M0[k_idx[i, n]]          inter[i] = sum_m q_w[i, m] M0[q_idx[i, m]]
//
// A padded token gives 0 in both. An index outside the stream's rows is absent.
//
// Macros  INDEX (int, long long), BANK (float, Bf16, Fp16), VECTOR (bank values of one load), GROUPS (rows side by side).
// Grid    (C tokens, P streams, 2 * column slices): z even for writes, odd for reads.
// Block   (threads across a slice, GROUPS).
// Reads   memory [P*S, D] (rows row_stride values apart), k_idx [rows, W], q_idx [rows, R], v [rows, D],
//         k_eff [chunks, C, W] and q_w [chunks, C, R] of the slab; lengths, cu_seqlens (chunk.cuh).
// Writes  residual, inter [P, C, D].
// Sums    over rows: each group its rows n = group, group + GROUPS, .. in turn, then the groups in order.
// Shared  dynamic, 12 * max(W, R) + 4 * GROUPS * slice columns bytes.
#include "chunk.cuh"
#include "numeric.cuh"

#define MAX_THREADS 512
#define LOADS 8                                // rows of a thread under way at once
#define SUMS ((VECTOR + GROUPS - 1) / GROUPS)  // columns that a thread adds up in the end

using BankWord = Word<BANK, VECTOR>;

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    gather(const BANK* memory, const INDEX* k_idx, const INDEX* q_idx, const BANK* v, const float* k_eff,
           const float* q_w, const void* lengths, const void* cu_seqlens, float* residual, float* inter,
           long long row_stride, int step, int slab_step, int P, int T, int C, int W, int R, int S, int D,
           int shared_bank, int wide) {
    const bool query = blockIdx.z & 1;
    const int p = blockIdx.y, i = blockIdx.x;
    const int lanes = query ? R : W;
    const int group = threadIdx.y, columns = blockDim.x * VECTOR;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * GROUPS;
    const int slice = (blockIdx.z >> 1) * columns, column = slice + threadIdx.x * VECTOR;

    long long* const offset = ptx::dynamic_shared<long long>();          // [lanes], -1 where absent
    float* const weight = reinterpret_cast<float*>(offset + max(W, R));  // [lanes]
    float* const partial = weight + max(W, R);                           // [GROUPS, columns]

    const Chunk chunk = chunk_of(step, p, T, C, lengths, cu_seqlens, wide);
    const bool padding = i >= chunk.tokens;
    if (!padding) {
        const long long row = (chunk.first_row + i) * lanes;
        const long long first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
        const float* const weights =
            (query ? q_w : k_eff) + (static_cast<long long>(step - slab_step) * P * C + p * C + i) * lanes;
        const INDEX* const index = (query ? q_idx : k_idx) + row;
        for (int n = thread; n < lanes; n += threads) {
            const long long slot = slot_within(ptx::load_readonly(index + n), first_slot, S);
            offset[n] = slot < 0 ? -1 : (first_slot + slot) * row_stride;
            weight[n] = weights[n];
        }
    }
    BANK given[SUMS];  // of v; on its way while rows are read
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        const int c = thread + k * threads;
        given[k] = BANK{};
        if (!query && !padding && c < columns && slice + c < D) given[k] = v[(chunk.first_row + i) * D + slice + c];
    }
    __syncthreads();

    float sum[VECTOR] = {};
    if (!padding && column < D) {
        for (int base = group; base < lanes; base += GROUPS * LOADS) {
            BankWord rows[LOADS];
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                const int n = base + l * GROUPS;
                rows[l] = BankWord{};
                if (n < lanes && offset[n] >= 0)
                    rows[l] = ptx::load_global(reinterpret_cast<const BankWord*>(memory + offset[n] + column));
            }
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                const int n = base + l * GROUPS;
                if (n >= lanes || offset[n] < 0) continue;
                float value[VECTOR];
                unpack<BANK, VECTOR>(rows[l], value);
#pragma unroll
                for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(weight[n], value[c], sum[c]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) partial[group * columns + threadIdx.x * VECTOR + c] = sum[c];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        const int c = thread + k * threads;
        if (c >= columns || slice + c >= D) continue;
        float total = partial[c];
#pragma unroll
        for (int other = 1; other < GROUPS; ++other) total += partial[other * columns + c];
        const long long at = (static_cast<long long>(p) * C + i) * D + slice + c;
        if (query)
            inter[at] = total;
        else
            residual[at] = padding ? 0.0f : to_float(given[k]) - total;
    }
}
