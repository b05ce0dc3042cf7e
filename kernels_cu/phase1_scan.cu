// Log-decays along the sorted entries of each chunk, the weights they give, and the records of its written slots.
//
// With x(e) the gate of an owner entry and 0 of any other, in the sorted order of one slot:
//     L(e) = sum of x up to e        tot = sum of x over the slot        rex(e) = tot - L(e)
//     k_eff = k_val exp(L)           q_w = q_val exp(L)                  cpe = exp(tot)
// Sums are exact (log_decay.cuh), so they depend on no split. Entries that are not valid give 0 everywhere.
//
// Macros  INDEX (int, long long), BANK (float, Bf16, Fp16).
// Grid    (chunks of a full slab); a block beyond the last chunk has none.
// Block   THREADS threads; a tile of THREADS * ITEMS sorted entries at a time, ITEMS in a row a thread.
// Reads   payload [chunks, payload_row], k_idx [rows, W], q_idx [rows, R], k_val [rows, W], q_val [rows, R],
//         g [rows, gates] with gates 1 or W, beta [rows], lengths, cu_seqlens (chunk.cuh).
// Writes  log_k, rex, k_eff, cpe [chunks, C, W], log_q, q_w [chunks, C, R], strength [chunks, C] (beta, 0 on padding);
//         flags [chunks, C, W] (bit 0: last K entry of its slot, bit 1: its only one); log_k, rex, cpe, log_q and flags
//         may be null.
//         Records in sorted order: write_entries, write_terms [chunks, C W]; partners [chunks, C, W + R];
//         slots [chunks, min(C W, S)], slot_count [chunks]; places [chunks, C W] and totals [chunks, min(C W, S)] are
//         scratch. Adds to repeats[0] the K entries that repeat a slot of their token.
// Shared  static: warp sums.
#include "chunk.cuh"
#include "entries.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define ITEMS 8
#define TILE (THREADS * ITEMS)

// The running sum of one slot: its log-decay and its K entries so far. `head` tells that the slot began inside.
struct Run {
    LogDecay log;
    int writes;
    int head;
};
static __device__ __forceinline__ Run operator+(Run a, Run b) {
    if (b.head) return b;
    return Run{a.log + b.log, a.writes + b.writes, a.head};
}
static __device__ __forceinline__ Run shuffle_up(Run x, int distance) {
    const unsigned all = 0xffffffffu;
    return Run{LogDecay{__shfl_up_sync(all, x.log.fixed, distance), __shfl_up_sync(all, x.log.erasures, distance),
                        __shfl_up_sync(all, x.log.nans, distance)},
               __shfl_up_sync(all, x.writes, distance), __shfl_up_sync(all, x.head, distance)};
}

// K entries, and slots that have one, before an entry of the chunk.
struct Counts {
    int writes;
    int slots;
};
static __device__ __forceinline__ Counts operator+(Counts a, Counts b) {
    return Counts{a.writes + b.writes, a.slots + b.slots};
}
static __device__ __forceinline__ Counts shuffle_up(Counts x, int distance) {
    return Counts{__shfl_up_sync(0xffffffffu, x.writes, distance), __shfl_up_sync(0xffffffffu, x.slots, distance)};
}

// The sum over all earlier threads of the block, `carry` first; advances `carry` by the whole block.
template <class T>
static __device__ __forceinline__ T scan_block(T mine, T* carry, T* warp_sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T inclusive = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T left = shuffle_up(inclusive, distance);
        if (lane >= distance) inclusive = left + inclusive;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    T before = *carry;
    for (int w = 0; w < warp; ++w) before = before + warp_sums[w];
    const T left = shuffle_up(inclusive, 1);
    const T result = lane == 0 ? before : before + left;
    __syncthreads();
    if (threadIdx.x == THREADS - 1) *carry = before + inclusive;
    return result;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    phase1_scan(const int* payload, const INDEX* k_idx, const INDEX* q_idx, const BANK* k_val, const BANK* q_val,
                const float* g, const float* beta, const void* lengths, const void* cu_seqlens, float* log_k,
                float* log_q, float* rex, float* cpe, float* k_eff, float* q_w, unsigned char* flags, float* strength,
                WriteEntry* write_entries, WriteTerm* write_terms, Partners* partners, SlotRecord* slots,
                int* slot_count, int2* places, LogDecay* totals, unsigned long long* repeats, int slab_step, int P,
                int T, int C, int W, int R, int S, int gates, int shared_bank, int wide) {
    __shared__ Run run_sums[WARPS];
    __shared__ Run run_carry;
    __shared__ Counts count_sums[WARPS];
    __shared__ Counts count_carry;
    const long long n = blockIdx.x;
    if (n >= chunks_of_slab(slab_step, gridDim.x, P, T, C)) return;
    const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(chunk.stream) * S;
    const int entries = C * (W + R);
    const long long k_base = n * C * W, q_base = n * C * R;
    const long long slot_base = n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
    payload += n * payload_row(C, W, R);
    partners += n * entries;

    for (int i = threadIdx.x; i < C; i += THREADS)
        strength[n * C + i] = i < chunk.tokens ? ptx::load_readonly(beta + chunk.first_row + i) : 0.0f;
    if (threadIdx.x == 0) {
        run_carry = Run{no_decay(), 0, 0};
        count_carry = Counts{0, 0};
    }
    __syncthreads();

    for (int tile = 0; tile < entries; tile += TILE) {
        const int base = tile + threadIdx.x * ITEMS;
        int code[ITEMS + 1];  // one more, to see where a slot ends
        Run step[ITEMS];
        Run mine{no_decay(), 0, 0};
#pragma unroll
        for (int i = 0; i <= ITEMS; ++i) code[i] = base + i < entries ? ptx::load_readonly(payload + base + i) : 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int c = code[i];
            step[i] = Run{no_decay(), 0, 0};
            if (c & IS_VALID) {
                const long long row = chunk.first_row + entry_token(c);
                if (c & IS_OWNER)
                    step[i].log = gate_decay(ptx::load_readonly(gates == 1 ? g + row : g + row * W + entry_lane(c)));
                step[i].writes = c & IS_QUERY ? 0 : 1;
                step[i].head = c & IS_HEAD ? 1 : 0;
            }
            mine = mine + step[i];
        }
        Run run = scan_block(mine, &run_carry, run_sums);
        Counts count{0, 0};
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            step[i] = run = run + step[i];
            const bool write = (code[i] & IS_VALID) && !(code[i] & IS_QUERY);
            count.writes += write;
            count.slots += write && run.writes == 1;
        }
        count = scan_block(count, &count_carry, count_sums);

#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int c = code[i];
            if (base + i >= entries) continue;
            const int token = entry_token(c), lane = entry_lane(c);
            const bool query = c & IS_QUERY;
            const long long at = query ? q_base + token * R + lane : k_base + token * W + lane;
            const LogDecay l = step[i].log;
            if (!(c & IS_VALID)) {
                (query ? q_w : k_eff)[at] = 0.0f;
                if (query) {
                    if (log_q != nullptr) log_q[at] = 0.0f;
                } else {
                    if (log_k != nullptr) log_k[at] = 0.0f;
                    if (rex != nullptr) rex[at] = 0.0f;
                    if (cpe != nullptr) cpe[at] = 0.0f;
                    if (flags != nullptr) flags[at] = 0;
                }
                partners[token * (W + R) + (query ? W : 0) + lane] = Partners::of(no_decay(), 0, 0);
                continue;
            }
            const long long row = chunk.first_row + token;
            if (query) {
                const float weight = to_float(q_val[row * R + lane]);
                q_w[at] = weight * exp_of(l);
                if (log_q != nullptr) log_q[at] = log_of(l);
            } else {
                const float weight = to_float(k_val[row * W + lane]);
                k_eff[at] = weight * exp_of(l);
                if (log_k != nullptr) log_k[at] = log_of(l);
                if (step[i].writes == 1) ++count.slots;
                write_entries[k_base + count.writes] = WriteEntry::of(l, weight, token);
                places[k_base + count.writes] = make_int2(token | lane << TOKEN_SHIFT, count.slots - 1);
                ++count.writes;
                if (!(c & IS_OWNER)) atomicAdd(repeats, 1ull);
            }
            partners[token * (W + R) + (query ? W : 0) + lane] =
                Partners::of(l, count.writes - step[i].writes, step[i].writes);
            const bool last = base + i + 1 == entries || !(code[i + 1] & IS_VALID) || (code[i + 1] & IS_HEAD);
            if (last && step[i].writes > 0) {
                const long long index = query ? q_idx[row * R + lane] : k_idx[row * W + lane];
                slots[slot_base + count.slots - 1] = SlotRecord{
                    static_cast<int>(index - first_slot), count.writes - step[i].writes, step[i].writes, exp_of(l)};
                totals[slot_base + count.slots - 1] = l;
            }
        }
        __syncthreads();
    }

    if (threadIdx.x == 0) slot_count[n] = count_carry.slots;
    const int writes = count_carry.writes;
    for (int k = threadIdx.x; k < writes; k += THREADS) {
        const int2 place = places[k_base + k];
        const int token = place.x & TOKEN_MASK, lane = place.x >> TOKEN_SHIFT;
        const long long at = k_base + token * W + lane;
        const WriteEntry entry = write_entries[k_base + k];
        const LogDecay rest = totals[slot_base + place.y] - entry.log();
        write_terms[k_base + k] = WriteTerm{entry.weight * exp_of(rest), token};
        if (rex != nullptr) rex[at] = log_of(rest);
        if (cpe == nullptr && flags == nullptr) continue;
        const SlotRecord slot = slots[slot_base + place.y];
        if (cpe != nullptr) cpe[at] = slot.cpe;
        if (flags != nullptr) flags[at] = (k == slot.first + slot.count - 1 ? 1 : 0) | (slot.count == 1 ? 2 : 0);
    }
}
