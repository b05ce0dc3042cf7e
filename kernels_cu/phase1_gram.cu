// The Gram matrices of each chunk: how much of an earlier token's write a token retrieves (A) or reads (QK).
//
//     A[i, j]  = sum over (n, m) with k_idx[i, n] == k_idx[j, m] of k_i k_j exp(L_i - L_j),   j <  i, else 0
//     QK[i, j] = sum over (n, m) with q_idx[i, n] == k_idx[j, m] of q_i k_j exp(L_i - L_j),   j <= i, else 0
//
// One thread owns one row and is its only writer, so a slot that every token touches costs each row its share.
//
// Macros  BANK (float, Bf16, Fp16).
// Grid    (chunks of a full slab, row bands of BAND tokens, 2): z = 0 for A, 1 for QK. A block beyond the last chunk has none.
// Block   BAND threads, one a row of the band.
// Reads   partners [chunks, C, W + R], write_entries [chunks, C W] (phase1_scan.cu), k_val [rows, W], q_val [rows, R],
//         lengths, cu_seqlens (chunk.cuh).
// Writes  a, qk [chunks, C, C], all of them.
// Sums    of a cell: lanes n in order, for each the slot's K entries in sorted order.
// Shared  dynamic, 4 * (BAND * (C + 1) - 1) bytes: the band's rows, a word of padding between them.
#include "chunk.cuh"
#include "entries.cuh"

#define BAND 64

extern "C" __global__ void __launch_bounds__(BAND)
    phase1_gram(const Partners* partners, const WriteEntry* write_entries, const BANK* k_val, const BANK* q_val,
                const void* lengths, const void* cu_seqlens, float* a, float* qk, int slab_step, int P, int T, int C,
                int W, int R, int wide) {
    float* const band = ptx::dynamic_shared<float>();  // [BAND, C + 1]
    const long long n = blockIdx.x;
    if (n >= chunks_of_slab(slab_step, gridDim.x, P, T, C)) return;
    const bool query = blockIdx.z == 1;
    const int first = blockIdx.y * BAND, i = first + threadIdx.x;
    const int lanes = query ? R : W;
    const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
    float* const row = band + threadIdx.x * (C + 1);
    for (int j = 0; j < C; ++j) row[j] = 0.0f;

    if (i < chunk.tokens) {
        const BANK* const value = query ? q_val + (chunk.first_row + i) * R : k_val + (chunk.first_row + i) * W;
        const Partners* const mine = partners + (n * C + i) * (W + R) + (query ? W : 0);
        write_entries += n * C * W;
        const int last = query ? i : i - 1;  // a token does not retrieve its own write
        for (int lane = 0; lane < lanes; ++lane) {
            const Partners range = mine[lane];
            if (range.begin() == range.end()) continue;
            const float weight = to_float(value[lane]);
            const LogDecay l = range.log();
            for (int k = range.begin(); k < range.end(); ++k) {
                const WriteEntry entry = write_entries[k];
                if (entry.token() > last) break;
                row[entry.token()] += weight * entry.weight * exp_of(l - entry.log());
            }
        }
    }
    __syncthreads();
    float* const out = (query ? qk : a) + (n * C + first) * C;
    const int cells = min(BAND, C - first) * C;
    for (int cell = threadIdx.x; cell < cells; cell += BAND) out[cell] = band[cell / C * (C + 1) + cell % C];
}
