// The written rows of a step, backwards: their gradient rows, their dots, and the bank's rows as they were.
//
//     d_tot(s) = cpe(s) <G1[s], M0[s]>          d_k_eff[i, n] = <-beta_i lam_i, M0[k_idx[i, n]]>
//     G0[s] = cpe(s) G1[s] + sum over K entries e of s of k_eff_e (-beta lam)[token(e)]          M[s] = M0[s]
//
// M0 is the snapshot. One warp owns one slot and is the only writer of its rows; gradient rows are rounded once.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), LOADS (words of a lane in a
//         slice of a row), SNAPSHOT (1 in the bank's format, 2 Bf16, 3 fp8, 4 int4).
// Grid    (blocks of WARPS slots, P streams).
// Block   32 * WARPS threads.
// Reads   snapshot, snapshot_scale (decay_write.cu); slots [chunks, capacity], slot_count [chunks], write_terms
//         [chunks, C W]; lam [chunks, C, D], strength [chunks, C]; capacity = min(C W, S).
// Writes  rows of gradient_bank [P*S, D] and of memory [P*S, D] (row_stride values apart); d_k_eff [chunks, C, W], of
//         present entries alone; d_tot [chunks, capacity].
// Sums    rows: terms in sorted order (token, then lane) onto the decayed row. Dots: the tree of rows.cuh.
// Shared  none.
#include "entries.cuh"
#include "rows.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    phase_a(GRADIENT* gradient_bank, BANK* memory, const void* snapshot, const float* snapshot_scale,
            const SlotRecord* slots, const int* slot_count, const WriteTerm* write_terms, const float* lam,
            const float* strength, float* d_k_eff, float* d_tot, long long row_stride, int step, int P, int C, int W,
            int S, int D, int shared_bank) {
    const int p = blockIdx.y, j = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long n = static_cast<long long>(step) * P + p;
    const long long kept = n * min(static_cast<long long>(C) * W, static_cast<long long>(S)) + j;

    // Records and snapshot are the forward's: they may be read before the wait.
    if (j >= slot_count[n]) {
        ptx::pdl_wait();
        return;
    }
    const SlotRecord slot = slots[kept];
    const long long row = (shared_bank ? 0 : static_cast<long long>(p) * S) + slot.slot;
    write_terms += n * C * W + slot.first;
    lam += n * C * D, strength += n * C, d_k_eff += n * C * W;
    GRADIENT* const gradient = gradient_bank + row * D;

    float total = 0.0f;
    for (int slice = 0; slice < D; slice += SLICE) {
        const int column = slice + lane * WORD;
        RowSlice<GRADIENT> after;
        KeptSlice before;
        before.load(snapshot, snapshot_scale, kept, column, D);
        if (slice == 0) {
            ptx::pdl_wait();
            ptx::pdl_trigger();
        }
        after.load(gradient, column, D);
        float value[LOADS][WORD];
        float product[LOADS] = {};
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            float restored[WORD];
            before.word(l, restored);
            after.word(l, value[l]);
#pragma unroll
            for (int c = 0; c < WORD; ++c) {
                product[l] = fmaf(value[l][c], restored[c], product[l]);
                value[l][c] *= slot.cpe;
            }
        }
        before.restore(memory + row * row_stride, column, D);
        total = add_blocks(total, product, slice, D);
        for (int e = 0; e < slot.count; ++e) {
            const WriteTerm term = write_terms[e];
            RowSlice<float> adjoint;
            adjoint.load_shared_row(lam + static_cast<long long>(term.token()) * D, column, D);
            const float beta = -strength[term.token()], weight = beta * term.k_eff;
            float dot[LOADS] = {};
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                float restored[WORD], change[WORD];
                before.word(l, restored);
                adjoint.word(l, change);
#pragma unroll
                for (int c = 0; c < WORD; ++c) {
                    dot[l] = fmaf(change[c], beta * restored[c], dot[l]);
                    value[l][c] = fmaf(weight, change[c], value[l][c]);
                }
            }
            float* const out = d_k_eff + term.token() * W + entry_lane(term.code);
            const float before_slice = lane == 0 && slice > 0 ? *out : 0.0f;
            const float sum = add_blocks(before_slice, dot, slice, D);
            if (lane == 0) *out = sum;
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) store_word(gradient, column + l * 32 * WORD, D, value[l]);
    }
    if (lane == 0) d_tot[kept] = slot.cpe == 0.0f ? 0.0f : slot.cpe * total;
}
