// Sorts the entries of each chunk by (slot, token, K before Q, lane).
//
// Entries come in the order token, K lanes, Q lanes; a stable radix sort by slot, least digit first, keeps that order
// inside a slot. An entry whose index lies outside its stream's rows, or whose token is padding, is not valid and
// follows the valid ones.
//
// Macros  INDEX (int, long long), ITEM (unsigned: slots of up to digit_bits + 15 bits; unsigned long long: any),
//         THREADS (512, 1024).
// Grid    blocks share the chunks: block b takes chunks b, b + gridDim.x, .. of the slab.
// Block   THREADS threads; each warp owns a consecutive part of the entries.
// Reads   k_idx [rows, W], q_idx [rows, R], lengths, cu_seqlens (chunk.cuh).
// Writes  payload [chunks, payload_row(C, W, R)]; between passes sort_scratch [gridDim.x, buffers, C (W + R)], where it
//         is not null, else shared memory; buffers = min(passes - 1, 2).
// Shared  static: one counter for each digit and warp. Dynamic, where sort_scratch is null: buffers C (W + R) items.
#include "chunk.cuh"
#include "entries.cuh"

#define WARPS (THREADS / 32)
#define DIGITS 256
#define ABSENT DIGITS  // the digit of an entry that is not valid
#define STRIDE (DIGITS + 1)
#define COUNTERS (STRIDE * WARPS)
#define CODE_BITS 17  // of an item: lane, token, kind; above them what the first pass leaves of the slot
#define CODE_MASK ((1u << CODE_BITS) - 1)
#define ALL 0xffffffffu

// The inputs of a chunk, by entry code.
struct Source {
    const INDEX* k_idx;
    const INDEX* q_idx;
    long long first_slot;
    Chunk chunk;
    int W, R, S;

    // The entry's slot, -1 where it is not valid.
    __device__ __forceinline__ int slot(int code) const {
        const int token = entry_token(code), lane = entry_lane(code);
        if (token >= chunk.tokens) return -1;
        const long long row = chunk.first_row + token;
        const INDEX index =
            code & IS_QUERY ? ptx::load_readonly(q_idx + row * R + lane) : ptx::load_readonly(k_idx + row * W + lane);
        return slot_within(index, first_slot, S);
    }
};

// Entry codes in input order, 32 entries a step.
struct Walk {
    int token, rest;  // entry = token (W + R) + rest

    __device__ __forceinline__ Walk(int entry, int lanes) : token(entry / lanes), rest(entry % lanes) {}
    __device__ __forceinline__ int code(int W) const {
        return token << TOKEN_SHIFT | (rest < W ? rest : (rest - W) | IS_QUERY);
    }
    __device__ __forceinline__ void advance(int lanes) {
        for (rest += 32; rest >= lanes; rest -= lanes) ++token;
    }
};

// Turns the counts of [warp][digit] into first places, in the order digit, then warp. Returns the places before ABSENT.
static __device__ __forceinline__ int scan_counters(int* counters, int* warp_sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int digit = threadIdx.x;  // one a thread; ABSENT comes after all others
    int sum = 0;
    if (digit < DIGITS)
        for (int w = 0; w < WARPS; ++w) sum += counters[w * STRIDE + digit];
    int inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int left = __shfl_up_sync(ALL, inclusive, distance);
        if (lane >= distance) inclusive += left;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int valid = 0, running = inclusive - sum;
    for (int w = 0; w < DIGITS / 32; ++w) {
        if (w < warp) running += warp_sums[w];
        valid += warp_sums[w];
    }
    if (digit == ABSENT) running = valid;
    if (digit <= ABSENT)
        for (int w = 0; w < WARPS; ++w) {
            const int count = counters[w * STRIDE + digit];
            counters[w * STRIDE + digit] = running;
            running += count;
        }
    __syncthreads();
    return valid;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1536 / THREADS)
    phase1_sort(const INDEX* k_idx, const INDEX* q_idx, const void* lengths, const void* cu_seqlens, ITEM* sort_scratch,
                int* payload, int slab_step, int slab_chunks, int P, int T, int C, int W, int R, int S, int shared_bank,
                int wide, int digit_bits, int passes) {
    __shared__ int counters[COUNTERS];  // [warp][digit]
    __shared__ int warp_sums[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int* const mine = counters + warp * STRIDE;
    const int lanes = W + R, entries = C * lanes;
    const int row = payload_row(C, W, R);
    const int buffers = min(passes - 1, 2);
    ITEM* const even = sort_scratch == nullptr
        ? ptx::dynamic_shared<ITEM>()
        : sort_scratch + static_cast<long long>(blockIdx.x) * buffers * entries;  // passes 0, 2
    ITEM* const odd = even + (buffers - 1) * entries;                             // pass 1
    const unsigned digit_mask = (1u << digit_bits) - 1;

    const int chunks = static_cast<int>(chunks_of_slab(slab_step, slab_chunks, P, T, C));
    for (int n = blockIdx.x; n < chunks; n += gridDim.x) {
        const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
        Source source{k_idx, q_idx, 0, chunk, W, R, S};
        if (!shared_bank) source.first_slot = static_cast<long long>(source.chunk.stream) * S;
        int* const sorted = payload + static_cast<long long>(n) * row;
        int count = entries;  // of the pass; after the first, the valid entries
        for (int pass = 0; pass < passes; ++pass) {
            const ITEM* const from = pass & 1 ? even : odd;
            ITEM* const to = pass & 1 ? odd : even;
            const int shift = CODE_BITS + (pass - 1) * digit_bits;
            const int part = ((count + WARPS - 1) / WARPS + 31) & ~31;
            const int begin = min(warp * part, count), end = min(begin + part, count);

            for (int i = threadIdx.x; i < COUNTERS; i += THREADS) counters[i] = 0;
            __syncthreads();
            Walk counted(begin + lane, lanes);
            for (int e = begin + lane; e < end; e += 32) {
                unsigned digit;
                if (pass == 0) {
                    const int slot = source.slot(counted.code(W));
                    digit = slot < 0 ? static_cast<unsigned>(ABSENT) : static_cast<unsigned>(slot) & digit_mask;
                    counted.advance(lanes);
                } else {
                    digit = static_cast<unsigned>(from[e] >> shift) & digit_mask;
                }
                atomicAdd(mine + digit, 1);
            }
            __syncthreads();
            const int valid = scan_counters(counters, warp_sums);

            // Lanes of one digit take consecutive places in lane order: the sort is stable.
            Walk placed(begin + lane, lanes);
            for (int base = begin; base < end; base += 32) {
                const int e = base + lane;
                ITEM item = 0;
                unsigned digit = ABSENT + 1;  // beyond the end
                if (e < end && pass == 0) {
                    const int code = placed.code(W);
                    const int slot = source.slot(code);
                    item = static_cast<ITEM>(code);
                    digit = ABSENT;
                    if (slot >= 0) {
                        item |= static_cast<ITEM>(static_cast<unsigned>(slot) >> digit_bits) << CODE_BITS;
                        digit = static_cast<unsigned>(slot) & digit_mask;
                    }
                    placed.advance(lanes);
                } else if (e < end) {
                    item = from[e];
                    digit = static_cast<unsigned>(item >> shift) & digit_mask;
                }
                const unsigned peers = __match_any_sync(ALL, digit);
                const int rank = __popc(peers & ((1u << lane) - 1));
                int place = 0;
                if (e < end) place = mine[digit] + rank;
                __syncwarp();
                if (e < end) {
                    if (rank == 0) mine[digit] += __popc(peers);
                    if (pass + 1 < passes)
                        to[place] = item;
                    else
                        sorted[place] = static_cast<int>(item & CODE_MASK);
                }
                __syncwarp();
            }
            if (pass == 0) count = valid;
            __syncthreads();
        }

        // Flags: a slot's and a token's first entries, from the neighbour before.
        for (int base = 0; base < row; base += THREADS) {
            const int i = base + threadIdx.x;
            int code = 0, slot = -1;
            if (i < count) {
                code = sorted[i] & CODE_MASK;
                slot = source.slot(code);
            } else if (i < entries) {
                code = passes > 1 ? static_cast<int>(even[i] & CODE_MASK) : sorted[i];
            }
            int before = __shfl_up_sync(ALL, code, 1), slot_before = __shfl_up_sync(ALL, slot, 1);
            if (lane == 0 && i > 0 && i < count) {
                before = sorted[i - 1] & CODE_MASK;
                slot_before = source.slot(before);
            }
            __syncthreads();  // the neighbour has been read
            if (i < count) {
                const bool head = i == 0 || slot_before != slot;
                const bool first_of_token = head || entry_token(before) != entry_token(code);
                code |= IS_VALID | (head ? IS_HEAD : 0) | (first_of_token && !(code & IS_QUERY) ? IS_OWNER : 0);
            }
            if (i < row) sorted[i] = code;
            __syncthreads();
        }
    }
}
