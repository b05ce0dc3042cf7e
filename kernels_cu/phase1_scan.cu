// Log-decays along the sorted entries of each chunk, the weights they give, and the records of its written slots.
//
// With x(e) the gate of an owner entry and 0 of any other, in the sorted order of one slot:
//     L(e) = sum of x up to e        tot = sum of x over the slot        rex(e) = tot - L(e)
//     k_eff = k_val exp(L)           q_w = q_val exp(L)                  cpe = exp(tot)
// Sums are exact (log_decay.cuh), so they depend on no split. Entries that are not valid give 0 everywhere.
//
// Macros  INDEX (int, long long), BANK (float, Bf16, Fp16), THREADS (256, 512).
// Grid    (chunks of a full slab); a block beyond the last chunk has none.
// Block   THREADS threads; a tile of THREADS sorted entries at a time, one a thread.
// Reads   payload [chunks, payload_row], k_idx [rows, W], q_idx [rows, R] (both null: the records number every slot 0),
//         k_val [rows, W], q_val [rows, R], g [rows, gates] with gates 1 or W, beta [rows], lengths, cu_seqlens
//         (chunk.cuh).
// Writes  log_k, rex, k_eff, cpe [chunks, C, W], log_q, q_w [chunks, C, R], strength [chunks, C] (beta, 0 on padding);
//         flags [chunks, C, W] (bit 0: last K entry of its slot, bit 1: its only one); log_k, rex, cpe, log_q and flags
//         may be null.
//         Records in sorted order: write_entries, write_terms [chunks, C W], of K entries; slots [chunks,
//         min(C W, S)], slot_count [chunks]; partners [chunks, C (W + R)], of those entries alone that meet a write of
//         their token or an earlier one, and partner_at [chunks, C, W + R], where (-1: it meets none). totals [chunks,
//         min(C W, S)] is scratch. Adds to repeats[0] the K entries that repeat a slot of their token.
//         For a backward, else null: write_weight [chunks, C, W] (k_val exp(rex)); read_entries, read_terms [chunks,
//         C R], of Q entries; read_slots [chunks, min(C R, S)], read_slot_count [chunks]; slot_reads [chunks,
//         min(C W, S)], the first of the Q entries of each written slot and how many.
// Shared  static: warp sums. Dynamic, with `staged`: the weights of the chunk, C (W + R) floats, on their way from
//         sorted to input order (k_eff and q_w, then write_weight): scattered words of many chunks would each cost a
//         memory sector.
#include "chunk.cuh"
#include "entries.cuh"

#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

// The running sum of one slot: its log-decay; in fields of one word its K and Q entries so far (up to 65,536 of each),
// erasures and NaNs (up to 256) and whether the slot began inside. Fields of a slot add without a carry between them.
struct Run {
    long long fixed;
    unsigned long long fields;

    static constexpr int READS = 18, ERASURES = 36, NANS = 46, HEAD = 56;

    __device__ __forceinline__ int writes() const {
        return static_cast<int>(fields & 0x3ffff);
    }
    __device__ __forceinline__ int reads() const {
        return static_cast<int>(fields >> READS & 0x3ffff);
    }
    __device__ __forceinline__ LogDecay log() const {
        return LogDecay{fixed, static_cast<int>(fields >> ERASURES & 0x3ff), static_cast<int>(fields >> NANS & 0x3ff)};
    }
};
static __device__ __forceinline__ Run operator+(Run a, Run b) {
    if (b.fields >> Run::HEAD) return b;
    return Run{a.fixed + b.fixed, a.fields + b.fields};
}
static __device__ __forceinline__ Run shuffle_up(Run x, int distance) {
    return Run{__shfl_up_sync(ALL, x.fixed, distance), __shfl_up_sync(ALL, x.fields, distance)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    phase1_scan(const int* payload, const INDEX* k_idx, const INDEX* q_idx, const BANK* k_val, const BANK* q_val,
                const float* g, const float* beta, const void* lengths, const void* cu_seqlens, float* log_k,
                float* log_q, float* rex, float* cpe, float* k_eff, float* q_w, unsigned char* flags, float* strength,
                EntryRecord* write_entries, WriteTerm* write_terms, Partners* partners, int* partner_at,
                SlotRecord* slots, int* slot_count, LogDecay* totals, unsigned long long* repeats, float* write_weight,
                EntryRecord* read_entries, ReadTerm* read_terms, ReadSlot* read_slots, int* read_slot_count,
                int2* slot_reads, int slab_step, int P, int T, int C, int W, int R, int S, int gates, int shared_bank,
                int wide, int staged) {
    __shared__ Run run_sums[WARPS];
    __shared__ int write_sums[WARPS], slot_sums[WARPS], read_slot_sums[WARPS];
    const long long n = blockIdx.x;
    if (n >= chunks_of_slab(slab_step, gridDim.x, P, T, C)) return;
    const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(chunk.stream) * S;
    const int entries = C * (W + R);
    const int lane_of_warp = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned lanes_before = (1u << lane_of_warp) - 1;
    const long long k_base = n * C * W, q_base = n * C * R;
    const long long slot_base = n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
    const long long read_slot_base = n * min(static_cast<long long>(C) * R, static_cast<long long>(S));
    const bool backward = write_weight != nullptr;
    payload += n * payload_row(C, W, R);
    partners += n * entries;
    partner_at += n * entries;

    float* const k_out = staged ? ptx::dynamic_shared<float>() : k_eff + k_base;
    float* const q_out = staged ? k_out + C * W : q_w + q_base;
    for (int i = threadIdx.x; i < entries; i += THREADS) partner_at[i] = -1;
    for (int i = threadIdx.x; i < C; i += THREADS)
        strength[n * C + i] = i < chunk.tokens ? ptx::load_readonly(beta + chunk.first_row + i) : 0.0f;

    Run carry{0, 0};  // of the tiles before, the same in every thread
    int writes_before = 0, slots_before = 0, read_slots_before = 0;
    // Codes are fetched two tiles ahead, weights and gates one.
    const auto code_at = [&](int at) { return at < entries ? ptx::load_readonly(payload + at) : 0; };
    const auto value_of = [&](int code) {
        const long long row = chunk.first_row + entry_token(code);
        if (!(code & IS_VALID)) return BANK{};
        return code & IS_QUERY ? q_val[row * R + entry_lane(code)] : k_val[row * W + entry_lane(code)];
    };
    const auto gate_of = [&](int code) {
        const long long row = chunk.first_row + entry_token(code);
        if (!(code & IS_OWNER)) return 0.0f;
        return ptx::load_readonly(gates == 1 ? g + row : g + row * W + entry_lane(code));
    };
    int code = code_at(threadIdx.x), next_code = code_at(threadIdx.x + THREADS);
    BANK next_value = value_of(code);
    float next_gate = gate_of(code);
    for (int tile = 0; tile < entries; tile += THREADS) {
        const int at = tile + threadIdx.x;
        const int after = code_at(at + 1), upcoming = code_at(at + 2 * THREADS);
        const float value = to_float(next_value), gate = next_gate;
        next_value = value_of(next_code);
        next_gate = gate_of(next_code);
        const int token = entry_token(code), lane = entry_lane(code);
        const bool valid = code & IS_VALID, query = code & IS_QUERY, write = valid && !query;
        const long long row = chunk.first_row + token;

        Run run{0, 0};
        if (valid) {
            run.fields = 1ull << (query ? Run::READS : 0);
            if (code & IS_HEAD) run.fields |= 1ull << Run::HEAD;
            if (code & IS_OWNER) {
                const LogDecay x = gate_decay(gate);
                run.fixed = x.fixed;
                run.fields += static_cast<unsigned long long>(x.erasures) << Run::ERASURES;
                run.fields += static_cast<unsigned long long>(x.nans) << Run::NANS;
            }
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const Run left = shuffle_up(run, distance);
            if (lane_of_warp >= distance) run = left + run;
        }
        if (lane_of_warp == 31) run_sums[warp] = run;
        __syncthreads();
        Run before = carry;
        for (int w = 0; w < WARPS; ++w) {
            if (w == warp) run = before + run;
            before = before + run_sums[w];
        }
        carry = before;

        const bool first_write = write && run.writes() == 1, first_read = valid && query && run.reads() == 1;
        const unsigned write_votes = __ballot_sync(ALL, write), slot_votes = __ballot_sync(ALL, first_write);
        const unsigned read_slot_votes = __ballot_sync(ALL, first_read);
        if (lane_of_warp == 0) {
            write_sums[warp] = __popc(write_votes), slot_sums[warp] = __popc(slot_votes);
            read_slot_sums[warp] = __popc(read_slot_votes);
        }
        __syncthreads();
        int k = writes_before + __popc(write_votes & lanes_before);  // K entries before this one
        int slot = slots_before + __popc(slot_votes & lanes_before) + (first_write ? 1 : 0) - 1;
        int read_slot = read_slots_before + __popc(read_slot_votes & lanes_before) + (first_read ? 1 : 0) - 1;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) k += write_sums[w], slot += slot_sums[w], read_slot += read_slot_sums[w];
            writes_before += write_sums[w];
            slots_before += slot_sums[w];
            read_slots_before += read_slot_sums[w];
        }

        const LogDecay l = run.log();
        const float weight = valid ? value * exp_of(l) : 0.0f;
        if (at < entries) {
            const long long out = query ? q_base + token * R + lane : k_base + token * W + lane;
            (query ? q_out + token * R : k_out + token * W)[lane] = weight;
            if (query && log_q != nullptr) log_q[out] = valid ? log_of(l) : 0.0f;
            if (!query) {
                if (log_k != nullptr) log_k[out] = valid ? log_of(l) : 0.0f;
                if (!valid && rex != nullptr) rex[out] = 0.0f;
                if (!valid && cpe != nullptr) cpe[out] = 0.0f;
                if (!valid && flags != nullptr) flags[out] = 0;
            }
            const bool meets = valid && run.writes() > (write ? 1 : 0);
            const int first = k + (write ? 1 : 0) - run.writes();
            if (meets) {
                partners[at] = Partners::of(l, first, run.writes());
                partner_at[token * (W + R) + (query ? W : 0) + lane] = at;
            }
            const int first_query = at + 1 - (k + (write ? 1 : 0)) - run.reads();
            if (write) {
                write_entries[k_base + k] = EntryRecord::of(l, value, token);
                write_terms[k_base + k] = WriteTerm{0.0f, weight, code & (LANE_MASK | TOKEN_MASK << TOKEN_SHIFT), slot};
                if (!(code & IS_OWNER)) atomicAdd(repeats, 1ull);
            } else if (valid && backward) {
                read_entries[q_base + at - k] = EntryRecord::of(l, value, token);
                read_terms[q_base + at - k] =
                    ReadTerm{weight, code & (LANE_MASK | TOKEN_MASK << TOKEN_SHIFT), first, run.writes()};
            }
            const bool last = !(after & IS_VALID) || (after & IS_HEAD);
            if (valid && last) {
                long long index = first_slot;
                if (k_idx != nullptr) index = query ? q_idx[row * R + lane] : k_idx[row * W + lane];
                const int place = static_cast<int>(index - first_slot);
                if (run.writes() > 0) {
                    slots[slot_base + slot] = SlotRecord{place, first, run.writes(), exp_of(l)};
                    totals[slot_base + slot] = l;
                    if (backward) slot_reads[slot_base + slot] = make_int2(first_query, run.reads());
                }
                if (backward && run.reads() > 0)
                    read_slots[read_slot_base + read_slot] =
                        ReadSlot{place, first_query, run.reads(), run.writes() > 0 ? 1 : 0};
            }
        }
        code = next_code;
        next_code = upcoming;
        __syncthreads();
    }

    if (threadIdx.x == 0) slot_count[n] = slots_before;
    if (threadIdx.x == 0 && backward) read_slot_count[n] = read_slots_before;
    if (staged) {
        for (int i = threadIdx.x; i < C * W; i += THREADS) k_eff[k_base + i] = k_out[i];
        for (int i = threadIdx.x; i < C * R; i += THREADS) q_w[q_base + i] = q_out[i];
    }
    float* const weight_out = staged ? k_out : write_weight + k_base;
    if (backward) {
        __syncthreads();
        for (int i = threadIdx.x; i < C * W; i += THREADS) weight_out[i] = 0.0f;
        __syncthreads();
    }
    for (int k = threadIdx.x; k < writes_before; k += THREADS) {
        WriteTerm term = write_terms[k_base + k];
        const EntryRecord entry = write_entries[k_base + k];
        const LogDecay rest = totals[slot_base + term.slot] - entry.log();
        term.weight = entry.weight * exp_of(rest);
        write_terms[k_base + k] = term;
        const int in_chunk = term.token() * W + entry_lane(term.code);
        if (backward) weight_out[in_chunk] = term.weight;
        if (rex == nullptr && cpe == nullptr && flags == nullptr) continue;
        const long long out = k_base + in_chunk;
        if (rex != nullptr) rex[out] = log_of(rest);
        const SlotRecord slot = slots[slot_base + term.slot];
        if (cpe != nullptr) cpe[out] = slot.cpe;
        if (flags != nullptr) flags[out] = (k == slot.first + slot.count - 1 ? 1 : 0) | (slot.count == 1 ? 2 : 0);
    }
    if (backward && staged) {
        __syncthreads();
        for (int i = threadIdx.x; i < C * W; i += THREADS) write_weight[k_base + i] = k_out[i];
    }
}
