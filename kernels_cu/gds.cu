// The read rows of a step, backwards: their gradient rows and the dots of the read weights.
//
//     d_q_w[i, m] = <gr[i], M0[q_idx[i, m]]>          G0[s] += sum over Q entries e of s of q_w_e gr[token(e)]
//
// The bank holds M0: Phase A has restored what the step had written. One warp owns one slot and is the only writer of
// its gradient row, which is rounded once.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), LOADS (words of a lane in a
//         slice of a row).
// Grid    (blocks of WARPS slots, P streams).
// Block   32 * WARPS threads.
// Reads   memory [P*S, D] (row_stride values apart); read_slots [chunks, capacity], read_slot_count [chunks], read_terms
//         [chunks, C R]; grad_readings [rows, D], lengths, cu_seqlens (chunk.cuh); capacity = min(C R, S).
// Writes  rows of gradient_bank [P*S, D]; d_q_w [chunks, C, R], of present entries alone.
// Sums    rows: entries in sorted order (token, then lane) onto the row. Dots: the tree of rows.cuh.
// Shared  none.
#include "chunk.cuh"
#include "entries.cuh"
#include "rows.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    gds(GRADIENT* gradient_bank, const BANK* memory, const ReadSlot* read_slots, const int* read_slot_count,
        const ReadTerm* read_terms, const BANK* grad_readings, const void* lengths, const void* cu_seqlens,
        float* d_q_w, long long row_stride, int step, int P, int T, int C, int R, int S, int D, int shared_bank,
        int wide) {
    const int p = blockIdx.y, j = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long n = static_cast<long long>(step) * P + p;
    if (j >= read_slot_count[n]) {
        ptx::pdl_wait();
        return;
    }
    const ReadSlot slot = read_slots[n * min(static_cast<long long>(C) * R, static_cast<long long>(S)) + j];
    const long long row = (shared_bank ? 0 : static_cast<long long>(p) * S) + slot.slot;
    const Chunk chunk = chunk_at(n, P, T, C, lengths, cu_seqlens, wide);
    read_terms += n * C * R + slot.first;
    d_q_w += n * C * R;
    GRADIENT* const gradient = gradient_bank + row * D;

    ptx::pdl_wait();
    ptx::pdl_trigger();
    for (int slice = 0; slice < D; slice += SLICE) {
        const int column = slice + lane * WORD;
        RowSlice<GRADIENT> after;
        RowSlice<BANK> before;
        after.load(gradient, column, D);
        before.load(memory + row * row_stride, column, D);
        float value[LOADS][WORD];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) after.word(l, value[l]);
        for (int e = 0; e < slot.count; ++e) {
            const ReadTerm term = read_terms[e];
            RowSlice<BANK> incoming;
            incoming.load_shared_row(grad_readings + (chunk.first_row + term.token()) * D, column, D);
            float dot[LOADS] = {};
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                float held[WORD], gr[WORD];
                before.word(l, held);
                incoming.word(l, gr);
#pragma unroll
                for (int c = 0; c < WORD; ++c) {
                    dot[l] = fmaf(gr[c], held[c], dot[l]);
                    value[l][c] = fmaf(term.q_w, gr[c], value[l][c]);
                }
            }
            float* const out = d_q_w + term.token() * R + entry_lane(term.code);
            const float before_slice = lane == 0 && slice > 0 ? *out : 0.0f;
            const float sum = add_blocks(before_slice, dot, slice, D);
            if (lane == 0) *out = sum;
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) store_word(gradient, column + l * 32 * WORD, D, value[l]);
    }
}
