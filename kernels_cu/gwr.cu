// Reads the bank's gradient at the end of a step: what the chunk's writes owe to it.
//
//     gwr[i] = sum_n k_val exp(rex) G1[k_idx[i, n]]          d_k_pd[i, n] = <G1[k_idx[i, n]], delta[i]>
//
// with delta = strength err. A padded token gives 0 in both; an index outside the stream's rows is absent.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), LOADS (words of a lane in a
//         slice of a row).
// Grid    (C tokens, P streams).
// Block   32 * WARPS threads. Group g has rows g, g + GROUPS, .. of the token; warp w takes groups w, w + WARPS, ..
// Reads   gradient_bank [P*S, D], k_idx [rows, W] (64-bit where wide_index), write_weight [chunks, C, W], err
//         [chunks, C, D], strength [chunks, C]; lengths, cu_seqlens (chunk.cuh).
// Writes  gwr [P, C, D], d_k_pd [chunks, C, W].
// Sums    gwr: each group its rows in turn, then the groups in order. Dots: the tree of rows.cuh.
// Shared  dynamic: 4 * GROUPS * SLICE + 16 * W bytes.
#include "chunk.cuh"
#include "rows.cuh"

#define GROUPS 16
#define NARROW_WARPS 8  // where rows are short: smaller blocks, so that more tokens are under way at once
#define WARPS (LOADS == 1 ? NARROW_WARPS : GROUPS)
#define OWN (GROUPS / WARPS)                             // groups of a warp
#define AHEAD (sizeof(GRADIENT) > sizeof(BANK) ? 1 : 2)  // rows of a group under way at once

extern "C" __global__ void __launch_bounds__(32 * WARPS, LOADS == 1 ? 4 : 1)
    gwr(const GRADIENT* gradient_bank, const void* k_idx, const float* write_weight, const float* err,
        const float* strength, const void* lengths, const void* cu_seqlens, float* gwr, float* d_k_pd, int step, int P,
        int T, int C, int W, int S, int D, int shared_bank, int wide, int wide_index) {
    const int i = blockIdx.x, p = blockIdx.y;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long n = static_cast<long long>(step) * P + p, token = n * C + i;
    float* const partial = ptx::dynamic_shared<float>();                               // [GROUPS, SLICE]
    long long* const offset = reinterpret_cast<long long*>(partial + GROUPS * SLICE);  // [W], -1 where absent
    float* const weight = reinterpret_cast<float*>(offset + W);                        // [W]
    float* const dot = weight + W;                                                     // [W]

    const Chunk chunk = chunk_of(step, p, T, C, lengths, cu_seqlens, wide);
    const bool padding = i >= chunk.tokens;
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
    for (int w = threadIdx.x; w < W; w += 32 * WARPS) {
        long long slot = -1;
        if (!padding) {
            const long long at = (chunk.first_row + i) * W + w;
            const long long row = wide_index ? ptx::load_readonly(static_cast<const long long*>(k_idx) + at)
                                             : ptx::load_readonly(static_cast<const int*>(k_idx) + at);
            slot = slot_within(row, first_slot, S);
        }
        offset[w] = slot < 0 ? -1 : (first_slot + slot) * D;
        weight[w] = write_weight[token * W + w];
        dot[w] = 0.0f;
    }
    const float beta = strength[token];
    __syncthreads();

    for (int slice = 0; slice < D; slice += SLICE) {
        const int column = slice + lane * WORD;
        RowSlice<float> change;
        change.load(err + token * D, column, D);
        if (slice == 0) {
            ptx::pdl_wait();
            ptx::pdl_trigger();
        }
        float sum[OWN][LOADS][WORD] = {};
        for (int base = warp; base < W; base += GROUPS * AHEAD) {
            RowSlice<GRADIENT> row[AHEAD][OWN];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
#pragma unroll
                for (int o = 0; o < OWN; ++o) {
                    const int w = base + a * GROUPS + o * WARPS;
                    if (w < W && offset[w] >= 0) row[a][o].load(gradient_bank + offset[w], column, D);
                }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
#pragma unroll
                for (int o = 0; o < OWN; ++o) {
                    const int w = base + a * GROUPS + o * WARPS;
                    if (w >= W || offset[w] < 0) continue;
                    float product[LOADS] = {};
#pragma unroll
                    for (int l = 0; l < LOADS; ++l) {
                        float value[WORD], delta[WORD];
                        row[a][o].word(l, value);
                        change.word(l, delta);
#pragma unroll
                        for (int c = 0; c < WORD; ++c) {
                            product[l] = fmaf(value[c], beta * delta[c], product[l]);
                            sum[o][l][c] = fmaf(weight[w], value[c], sum[o][l][c]);
                        }
                    }
                    const float total = add_blocks(dot[w], product, slice, D);
                    __syncwarp();
                    if (lane == 0) dot[w] = total;
                }
        }
#pragma unroll
        for (int o = 0; o < OWN; ++o)
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
                store_floats(partial + (o * WARPS + warp) * SLICE + (l * 32 + lane) * WORD, sum[o][l]);
        __syncthreads();
        for (int c = threadIdx.x; c < SLICE && slice + c < D; c += 32 * WARPS) {
            float total = partial[c];
#pragma unroll
            for (int other = 1; other < GROUPS; ++other) total += partial[other * SLICE + c];
            gwr[(static_cast<long long>(p) * C + i) * D + slice + c] = total;
        }
        __syncthreads();
    }
    for (int w = threadIdx.x; w < W; w += 32 * WARPS) d_k_pd[token * W + w] = dot[w];
}
