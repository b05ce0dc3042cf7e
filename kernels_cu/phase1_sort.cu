// Sorts the entries of each chunk by (slot, token, K before Q, lane).
//
// An item is an entry as a number: slot, token and lane among the token's W + R (its K lanes, then its Q lanes), most
// significant first. Items are made in the order of token and lane; a stable radix sort by slot, least digit first,
// keeps that order inside a slot. An entry whose index lies outside its stream's rows, or whose token is padding, is
// not valid: the first pass sends it behind the valid ones, and no later pass sees it.
//
// A pass: each warp counts the digits of its part of the items; a scan over digits and warps turns counts into first
// places; each warp moves its items to their places, 32 at a time.
//
// Macros  INDEX (int, long long), ITEM (unsigned where an item has at most 32 bits, else unsigned long long),
//         IN_SHARED (1: items lie in shared memory, 0: in sort_scratch), THREADS (256, 1024).
// Grid    blocks share the chunks: block b takes chunks b, b + gridDim.x, .. of the slab.
// Block   THREADS threads; each warp owns a consecutive part of the items.
// Reads   k_idx [rows, W], q_idx [rows, R], lengths, cu_seqlens (chunk.cuh).
// Writes  payload, sorted_slots [chunks, payload_row(C, W, R)]: the sorted entries, and the slots of those that are
//         valid. Scratch, unless IN_SHARED: sort_scratch [gridDim.x, 2, C (W + R)].
// Shared  static: one counter for each digit and warp, two sums for each warp. Dynamic, if IN_SHARED: 2 C (W + R) items.
#include "chunk.cuh"
#include "entries.cuh"
#include "peers.cuh"

#define WARPS (THREADS / 32)
#define DIGIT_BITS 8  // of the widest digit
#define DIGITS (1 << DIGIT_BITS)
#define LOADS 4  // indices under way at once
#define ALL 0xffffffffu

// Counts of [warp][digit] become first places, in the order digit, then warp.
static __device__ __forceinline__ void scan_counters(int* counters, int* warp_sums, int digits) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int digit = threadIdx.x;  // one a thread
    int count[WARPS], sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        count[w] = digit < digits ? counters[w * digits + digit] : 0;
        sum += count[w];
    }
    int inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int left = __shfl_up_sync(ALL, inclusive, distance);
        if (lane >= distance) inclusive += left;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    if (digit < digits) {
        int place = inclusive - sum;
        for (int w = 0; w < warp; ++w) place += warp_sums[w];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            counters[w * digits + digit] = place;
            place += count[w];
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    phase1_sort(const INDEX* k_idx, const INDEX* q_idx, const void* lengths, const void* cu_seqlens, ITEM* sort_scratch,
                int* payload, int* sorted_slots, int slab_step, int slab_chunks, int P, int T, int C, int W, int R,
                int S, int shared_bank, int wide, int digit_bits, int passes) {
    __shared__ int counters[WARPS * DIGITS];  // [warp][digit]
    __shared__ int warp_sums[WARPS], valid_of_warp[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const unsigned lanes_before = (1u << lane) - 1, lanes_after = ~lanes_before << 1;
    const int digits = 1 << digit_bits;
    int* const mine = counters + warp * digits;
    const int lanes = W + R, entries = C * lanes;
    const int row = payload_row(C, W, R);
    const int step_tokens = 32 / lanes, step_rest = 32 % lanes;
    const int lane_bits = 32 - __clz(lanes - 1), code_bits = lane_bits + 32 - __clz(C - 1);
    // The valid items of each part are packed into `packed`; passes alternate between the buffers.
    ITEM* const buffers =
        IN_SHARED ? ptx::dynamic_shared<ITEM>() : sort_scratch + static_cast<long long>(blockIdx.x) * 2 * entries;
    ITEM* const packed = buffers + entries;

    const int chunks = static_cast<int>(chunks_of_slab(slab_step, slab_chunks, P, T, C));
    for (int n = blockIdx.x; n < chunks; n += gridDim.x) {
        const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
        const long long first_slot = shared_bank ? 0 : static_cast<long long>(chunk.stream) * S;
        const INDEX* const k_chunk = k_idx + chunk.first_row * W;
        const INDEX* const q_chunk = q_idx + chunk.first_row * R;
        int* const sorted = payload + static_cast<long long>(n) * row;
        int* const slots = sorted_slots + static_cast<long long>(n) * row;
        const auto part_of = [&](int count) { return ((count + WARPS - 1) / WARPS + 31) & ~31; };
        const auto payload_code = [&](ITEM item) {  // without flags
            const int code = static_cast<int>(item) & ((1 << code_bits) - 1), lane = code & ((1 << lane_bits) - 1);
            return code >> lane_bits << TOKEN_SHIFT | (lane < W ? lane : (lane - W) | IS_QUERY);
        };

        // This warp's part of the entries: the items of valid ones to its front, the codes of others to its back, last
        // first.
        int part = part_of(entries), begin = min(warp * part, entries), end = min(begin + part, entries);
        for (int i = lane; i < digits; i += 32) mine[i] = 0;
        __syncwarp();
        int front = begin;
        int token = (begin + lane) / lanes, rest = (begin + lane) % lanes;
        const int real_end = min(end, chunk.tokens * lanes);
        for (int base = begin; base < end; base += 32 * LOADS) {
            INDEX index[LOADS];
            int code[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                code[k] = token << lane_bits | rest;
                index[k] = 0;
                const bool query = rest >= W;
                const int at = token * (query ? R : W) + rest - (query ? W : 0);
                if (base + 32 * k + lane < real_end) index[k] = ptx::load_readonly((query ? q_chunk : k_chunk) + at);
                token += step_tokens, rest += step_rest;
                if (rest >= lanes) ++token, rest -= lanes;
            }
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int e = base + 32 * k + lane;
                const int slot = e < real_end ? slot_within(index[k], first_slot, S) : -1;
                const unsigned votes = __ballot_sync(ALL, slot >= 0);
                const int place = front + __popc(votes & lanes_before);
                if (slot >= 0) {
                    packed[place] = static_cast<ITEM>(slot) << code_bits | static_cast<ITEM>(code[k]);
                    atomicAdd(mine + (slot & (digits - 1)), 1);
                } else if (e < end) {
                    packed[end - 1 - (e - place)] = static_cast<ITEM>(code[k]);
                }
                front += __popc(votes);
            }
        }
        if (lane == 0) valid_of_warp[warp] = front - begin;
        __syncthreads();
        int valid = 0, valid_before = 0;
        for (int w = 0; w < WARPS; ++w) {
            if (w == warp) valid_before = valid;
            valid += valid_of_warp[w];
        }
        for (int i = front + lane; i < end; i += 32)
            sorted[valid - valid_before + begin + i - front] = payload_code(packed[end - 1 - (i - front)]);
        end = front;

        ITEM* from = packed;
        ITEM* to = buffers;
        for (int pass = 0; pass < passes; ++pass) {
            const int shift = code_bits + pass * digit_bits;
            const auto digit_of = [&](ITEM item) { return static_cast<unsigned>(item >> shift) & (digits - 1); };
            if (pass > 0) {
                part = part_of(valid), begin = min(warp * part, valid), end = min(begin + part, valid);
                for (int i = lane; i < digits; i += 32) mine[i] = 0;
                __syncwarp();
                for (int i = begin + lane; i < end; i += 32) atomicAdd(mine + digit_of(from[i]), 1);
                __syncthreads();
            }
            scan_counters(counters, warp_sums, digits);

            // Lanes of one digit take consecutive places in lane order: the sort is stable.
            for (int base = begin; base < end; base += 32) {
                const bool inside = base + lane < end;
                const ITEM item = inside ? from[base + lane] : 0;
                const unsigned digit = digit_of(item);
                const unsigned peers = peers_of<DIGIT_BITS>(digit, __ballot_sync(ALL, inside));
                const int place = mine[digit] + __popc(peers & lanes_before);
                __syncwarp();
                if (inside) to[place] = item;
                if (inside && (peers & lanes_after) == 0) mine[digit] = place + 1;  // the last of its digit
                __syncwarp();
            }
            __syncthreads();
            ITEM* const moved = to;
            to = from, from = moved;
        }

        // Flags: a slot's and a token's first entries, from the item before.
        for (int i = threadIdx.x; i < row; i += THREADS) {
            if (i < valid) {
                const ITEM item = from[i], differs = i == 0 ? ~static_cast<ITEM>(0) : item ^ from[i - 1];
                int code = payload_code(item) | IS_VALID;
                if (differs >> code_bits != 0) code |= IS_HEAD;
                if (differs >> lane_bits != 0 && !(code & IS_QUERY)) code |= IS_OWNER;
                sorted[i] = code;
                slots[i] = static_cast<int>(item >> code_bits);
            } else if (i >= entries) {
                sorted[i] = 0;
            }
        }
        __syncthreads();  // before the buffers hold the next chunk
    }
}
