// The Gram matrices of each chunk: how much of an earlier token's write a token retrieves (A) or reads (QK).
//
//     A[i, j]  = sum over (n, m) with k_idx[i, n] == k_idx[j, m] of k_i k_j exp(L_i - L_j),   j <  i, else 0
//     QK[i, j] = sum over (n, m) with q_idx[i, n] == k_idx[j, m] of q_i k_j exp(L_i - L_j),   j <= i, else 0
//
// One warp owns one row and is its only writer, so a slot that every token touches costs each row its share.
//
// Macros  BANK (float, Bf16, Fp16).
// Grid    (chunks of a full slab, ceil(C / ROWS), 2): z = 0 for A, 1 for QK. A block beyond the last chunk has none.
// Block   32 * ROWS threads, a warp a row.
// Reads   partner_at [chunks, C, W + R], partners [chunks, C (W + R)], write_entries [chunks, C W] (phase1_scan.cu),
//         k_val [rows, W], q_val [rows, R], lengths, cu_seqlens (chunk.cuh).
// Writes  a, qk [chunks, C, C], all of them.
// Sums    of a cell, 32 lanes n at a time: the first K entries of those lanes' slots with up to SHORT of them, by lane,
//         then the second ones, and so on; then the lanes with more in order, each its slot's K entries in sorted order.
// Shared  dynamic, 4 * min(ROWS, C) * C bytes: the block's rows.
#include "chunk.cuh"
#include "entries.cuh"
#include "peers.cuh"

#define ROWS 8
#define SHORT 8  // partners of a lane that its own thread goes through; of more, the whole warp does
#define ALL 0xffffffffu

static __device__ __forceinline__ Partners of_lane(const Partners& x, int lane) {
    int word[4];
    memcpy(word, &x, sizeof(x));
#pragma unroll
    for (int w = 0; w < 4; ++w) word[w] = __shfl_sync(ALL, word[w], lane);
    Partners got;
    memcpy(&got, word, sizeof(got));
    return got;
}

// Adds the terms of the threads that have one to their tokens' cells; threads of one token take turns, lowest first.
static __device__ __forceinline__ void add_by_lane(float* row, int token, float term, bool adds) {
    const unsigned threads = __ballot_sync(ALL, adds);
    if (threads == 0) return;
    const unsigned same = peers_of<8>(token, threads);
    const int turn = __popc(same & (1u << threadIdx.x % 32) - 1);
    for (int now = 0; __any_sync(ALL, adds && turn >= now); ++now) {
        if (adds && turn == now) row[token] += term;
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROWS, 4)
    phase1_gram(const int* partner_at, const Partners* partners, const EntryRecord* write_entries, const BANK* k_val,
                const BANK* q_val, const void* lengths, const void* cu_seqlens, float* a, float* qk, int slab_step,
                int P, int T, int C, int W, int R, int wide) {
    float* const rows = ptx::dynamic_shared<float>();  // [ROWS, C]
    const long long n = blockIdx.x;
    if (n >= chunks_of_slab(slab_step, gridDim.x, P, T, C)) return;
    const bool query = blockIdx.z == 1;
    const int thread = threadIdx.x % 32, i = blockIdx.y * ROWS + threadIdx.x / 32;
    if (i >= C) return;
    const int lanes = query ? R : W;
    const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
    float* const row = rows + threadIdx.x / 32 * C;
    for (int j = thread; j < C; j += 32) row[j] = 0.0f;
    __syncwarp();

    if (i < chunk.tokens) {
        const BANK* const value = query ? q_val + (chunk.first_row + i) * R : k_val + (chunk.first_row + i) * W;
        partner_at += (n * C + i) * (W + R) + (query ? W : 0);
        partners += n * C * (W + R);
        write_entries += n * C * W;
        const int last = query ? i : i - 1;  // a token does not retrieve its own write
        // Adds a range, 32 entries at a time.
        const auto add_range = [&](const Partners& range, float weight) {
            const LogDecay l = range.log();
            for (int first = range.begin(); first < range.end(); first += 32) {
                int token = 0;
                float term = 0.0f;
                bool adds = false;
                if (first + thread < range.end()) {
                    const EntryRecord entry = write_entries[first + thread];
                    token = entry.token(), adds = token <= last;
                    if (adds) term = weight * entry.weight * exp_of(l - entry.log());
                }
                add_by_lane(row, token, term, adds);
            }
        };
        // What a lane meets is on its way while the lanes before it are added.
        const auto place_of = [&](int lane) { return lane < lanes ? partner_at[lane] : -1; };
        const auto partners_of = [&](int at) { return at >= 0 ? partners[at] : Partners{}; };
        const auto weight_of = [&](int lane, int at) { return at >= 0 ? to_float(value[lane]) : 0.0f; };
        int at = place_of(thread), at_behind = place_of(32 + thread);
        Partners coming_partners = partners_of(at);
        float coming_weight = weight_of(thread, at);
        for (int base = 0; base < lanes; base += 32) {
            const Partners mine = coming_partners;
            const float my_weight = coming_weight;
            coming_partners = partners_of(at_behind), coming_weight = weight_of(base + 32 + thread, at_behind);
            at_behind = place_of(base + 64 + thread);
            const bool is_long = mine.end() - mine.begin() > SHORT;
            const int begin = mine.begin(), end = is_long ? begin : mine.end();
            EntryRecord coming{};
            if (begin < end) coming = write_entries[begin];
            for (int e = begin; __any_sync(ALL, e < end); ++e) {
                const EntryRecord entry = coming;
                if (e + 1 < end) coming = write_entries[e + 1];
                const int token = entry.token();
                const bool adds = e < end && token <= last;
                const float term = adds ? my_weight * entry.weight * exp_of(mine.log() - entry.log()) : 0.0f;
                add_by_lane(row, token, term, adds);
            }
            for (unsigned left = __ballot_sync(ALL, is_long); left != 0; left &= left - 1) {
                const int source = __ffs(left) - 1;
                add_range(of_lane(mine, source), __shfl_sync(ALL, my_weight, source));
            }
        }
    }
    float* const out = (query ? qk : a) + (n * C + i) * C;
    for (int j = thread; j < C; j += 32) out[j] = row[j];
}
