// Adds the dots that the slices of a persistent backward have left, for one slab: the last levels of the tree of
// rows.cuh.
//
// Macros  none.
// Grid    (chunks of a slab, 4: d_k_pd, d_k_eff, d_q_w, d_tot).
// Block   THREADS threads.
// Reads   partial_k_pd, partial_k_eff [slices, slab_chunks, C, W], partial_q_w [slices, slab_chunks, C, R], partial_tot
//         [slices, slab_chunks, capacity]; k_idx [rows, W], q_idx [rows, R] (64-bit where wide_index); slots [chunks,
//         capacity], slot_count [chunks]; lengths, cu_seqlens (chunk.cuh); capacity = min(C W, S).
// Writes  d_k_pd [chunks, C, W]; of present entries alone d_k_eff [chunks, C, W] and d_q_w [chunks, C, R]; of the slots
//         that a chunk writes d_tot [chunks, capacity].
// Sums    `halves` slices make a block of 256 bytes of the bank's format (1: a slice is one; 2: the row's missing half
//         counts as 0); then the blocks in order.
// Shared  none.
#include "chunk.cuh"
#include "entries.cuh"

#define THREADS 256

// Cell `cell` of partial sums `stride` apart.
static __device__ __forceinline__ float add_slices(const float* partial, long long stride, int slices, int halves) {
    float total = 0.0f;
#pragma unroll 4
    for (int slice = 0; slice < slices; slice += halves) {
        float block = partial[slice * stride];
        if (halves == 2) block += slice + 1 < slices ? partial[(slice + 1) * stride] : 0.0f;
        total = slice == 0 ? block : total + block;
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sum(const float* partial_k_pd, const float* partial_k_eff, const float* partial_q_w,
               const float* partial_tot, const void* k_idx, const void* q_idx, const SlotRecord* slots,
               const int* slot_count, const void* lengths, const void* cu_seqlens, float* d_k_pd, float* d_k_eff,
               float* d_q_w, float* d_tot, int slab_step, int slab_chunks, int P, int T, int C, int W, int R, int S,
               int shared_bank, int wide, int wide_index, int slices, int halves) {
    const int kind = blockIdx.y;
    const long long slab = blockIdx.x, call = static_cast<long long>(slab_step) * P + slab;
    if (slab >= chunks_of_slab(slab_step, slab_chunks, P, T, C)) return;
    const Chunk chunk = chunk_at(call, P, T, C, lengths, cu_seqlens, wide);
    const int capacity = static_cast<int>(min(static_cast<long long>(C) * W, static_cast<long long>(S)));

    if (kind == 3) {
        const int count = slot_count[call];
        for (int j = threadIdx.x; j < count; j += THREADS) {
            const float total = add_slices(partial_tot + slab * capacity + j,
                                           static_cast<long long>(slab_chunks) * capacity, slices, halves);
            const float cpe = slots[call * capacity + j].cpe;
            d_tot[call * capacity + j] = cpe == 0.0f ? 0.0f : cpe * total;
        }
        return;
    }
    const int lanes = kind == 2 ? R : W;
    const float* const partial = kind == 0 ? partial_k_pd : kind == 1 ? partial_k_eff : partial_q_w;
    float* const out = kind == 0 ? d_k_pd : kind == 1 ? d_k_eff : d_q_w;
    const void* const indices = kind == 2 ? q_idx : k_idx;
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(chunk.stream) * S;
    for (int cell = threadIdx.x; cell < C * lanes; cell += THREADS) {
        if (kind > 0) {
            if (cell >= chunk.tokens * lanes) break;
            const long long at = chunk.first_row * lanes + cell;
            const long long row = wide_index ? ptx::load_readonly(static_cast<const long long*>(indices) + at)
                                             : ptx::load_readonly(static_cast<const int*>(indices) + at);
            if (slot_within(row, first_slot, S) < 0) continue;
        }
        out[call * C * lanes + cell] = add_slices(partial + slab * C * lanes + cell,
                                                  static_cast<long long>(slab_chunks) * C * lanes, slices, halves);
    }
}
