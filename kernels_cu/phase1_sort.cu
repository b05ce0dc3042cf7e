// Sorts the entries of each chunk by (slot, token, K before Q, lane).
//
// Entries come in the order token, K lanes, Q lanes; a stable radix sort by slot, least digit first, keeps that order
// inside a slot. An entry whose index lies outside its stream's rows, or whose token is padding, is not valid and
// follows the valid ones.
//
// Macros  INDEX (int, long long).
// Grid    blocks share the chunks: block b takes chunks b, b + gridDim.x, .. of the slab.
// Block   THREADS threads; each warp owns a consecutive part of the entries.
// Reads   k_idx [rows, W], q_idx [rows, R], lengths, cu_seqlens (chunk.cuh).
// Writes  payload [chunks, payload_row(C, W, R)]; sort_scratch [gridDim.x, 2, C (W + R)] between passes.
// Shared  static: one counter for each digit and warp.
#include "chunk.cuh"
#include "entries.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define DIGITS 256
#define ABSENT DIGITS  // the digit of an entry that is not valid
#define COUNTERS ((DIGITS + 1) * WARPS)
#define COUNTERS_A_THREAD ((COUNTERS + THREADS - 1) / THREADS)

struct Item {
    unsigned slot;
    int entry;
};

struct Source {
    const INDEX* k_idx;
    const INDEX* q_idx;
    long long first_slot;
    Chunk chunk;
    int W, R, S;

    __device__ __forceinline__ Item item(int e) const {
        const int lanes = W + R;
        const int token = e / lanes;
        int lane = e - token * lanes;
        const bool query = lane >= W;
        if (query) lane -= W;
        Item result{0u, lane | token << TOKEN_SHIFT | (query ? IS_QUERY : 0)};
        if (token < chunk.tokens) {
            const long long row = chunk.first_row + token;
            const INDEX index =
                query ? ptx::load_readonly(q_idx + row * R + lane) : ptx::load_readonly(k_idx + row * W + lane);
            const int slot = slot_within(index, first_slot, S);
            if (slot >= 0) {
                result.slot = static_cast<unsigned>(slot);
                result.entry |= IS_VALID;
            }
        }
        return result;
    }
};

// Exclusive sums of counters[0 .. COUNTERS) in place.
static __device__ __forceinline__ void scan_counters(int* counters, int* warp_sums) {
    const int first = threadIdx.x * COUNTERS_A_THREAD;
    int sum = 0;
    for (int i = 0; i < COUNTERS_A_THREAD; ++i)
        if (first + i < COUNTERS) sum += counters[first + i];
    int inclusive = sum;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (lane >= distance) inclusive += left;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int running = inclusive - sum;
    for (int w = 0; w < warp; ++w) running += warp_sums[w];
    for (int i = 0; i < COUNTERS_A_THREAD; ++i)
        if (first + i < COUNTERS) {
            const int count = counters[first + i];
            counters[first + i] = running;
            running += count;
        }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    phase1_sort(const INDEX* k_idx, const INDEX* q_idx, const void* lengths, const void* cu_seqlens, Item* sort_scratch,
                int* payload, int slab_step, int slab_chunks, int P, int T, int C, int W, int R, int S, int shared_bank,
                int wide, int digit_bits, int passes) {
    __shared__ int counters[COUNTERS];  // [digit][warp]
    __shared__ int warp_sums[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int entries = C * (W + R);
    const int row = payload_row(C, W, R);
    Item* const even = sort_scratch + 2ll * blockIdx.x * entries;  // passes 0, 2, .. write here
    Item* const odd = even + entries;
    const unsigned digit_mask = (1u << digit_bits) - 1;

    const int chunks = static_cast<int>(chunks_of_slab(slab_step, slab_chunks, P, T, C));
    for (int n = blockIdx.x; n < chunks; n += gridDim.x) {
        const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
        Source source{k_idx, q_idx, 0, chunk, W, R, S};
        if (!shared_bank) source.first_slot = static_cast<long long>(source.chunk.stream) * S;
        int count = entries;  // of the pass; after the first, the valid entries
        for (int pass = 0; pass < passes; ++pass) {
            const Item* const from = pass & 1 ? even : odd;
            Item* const to = pass & 1 ? odd : even;
            const int part = ((count + WARPS - 1) / WARPS + 31) & ~31;
            const int begin = min(warp * part, count), end = min(begin + part, count);

            for (int i = threadIdx.x; i < COUNTERS; i += THREADS) counters[i] = 0;
            __syncthreads();
            for (int e = begin + lane; e < end; e += 32) {
                const Item item = pass == 0 ? source.item(e) : from[e];
                const unsigned digit = item.entry & IS_VALID ? item.slot >> (pass * digit_bits) & digit_mask
                                                             : static_cast<unsigned>(ABSENT);
                atomicAdd(counters + digit * WARPS + warp, 1);
            }
            __syncthreads();
            scan_counters(counters, warp_sums);
            const int valid = counters[ABSENT * WARPS];
            __syncthreads();

            // Lanes of one digit take consecutive places in lane order: the sort is stable.
            for (int base = begin; base < end; base += 32) {
                const int e = base + lane;
                Item item{0u, 0};
                unsigned digit = ABSENT + 1;  // beyond the end
                if (e < end) {
                    item = pass == 0 ? source.item(e) : from[e];
                    digit = item.entry & IS_VALID ? item.slot >> (pass * digit_bits) & digit_mask
                                                  : static_cast<unsigned>(ABSENT);
                }
                const unsigned peers = __match_any_sync(0xffffffffu, digit);
                const int rank = __popc(peers & ((1u << lane) - 1));
                int place = 0;
                if (e < end) place = counters[digit * WARPS + warp] + rank;
                __syncwarp();
                if (e < end) {
                    if (rank == 0) counters[digit * WARPS + warp] += __popc(peers);
                    to[place] = item;
                }
                __syncwarp();
            }
            if (pass == 0) count = valid;
            __syncthreads();
        }

        const Item* const sorted = passes & 1 ? even : odd;
        for (int i = threadIdx.x; i < row; i += THREADS) {
            int code = 0;
            if (i < count) {
                const Item item = sorted[i];
                bool head = true, first_of_token = true;
                if (i > 0) {
                    const Item before = sorted[i - 1];
                    head = before.slot != item.slot;
                    first_of_token = head || entry_token(before.entry) != entry_token(item.entry);
                }
                code = item.entry | (head ? IS_HEAD : 0);
                if (first_of_token && !(item.entry & IS_QUERY)) code |= IS_OWNER;
            } else if (i < entries) {
                code = even[i].entry;
            }
            payload[static_cast<long long>(n) * row + i] = code;
        }
        __syncthreads();
    }
}
