// Log-decays along the sorted entries of each chunk, the weights they give, and the records of its written slots.
//
// With x(e) the gate of an owner entry and 0 of any other, in the sorted order of one slot:
//     L(e) = sum of x up to e        tot = sum of x over the slot        rex(e) = tot - L(e)
//     k_eff = k_val exp(L)           q_w = q_val exp(L)                  cpe = exp(tot)
// Sums are exact (log_decay.cuh), so they depend on no split. Entries that are not valid give 0 everywhere.
//
// Each warp owns a consecutive part of the sorted entries. It first looks at the flags of its part alone, and at the
// gates of the slot that its end cuts: what the parts before say tells each warp the state with which its part begins.
// Then it walks its part, 32 entries at a time, without a barrier. A K entry is finished, with its rex, where its slot
// ends: among the same 32, later in the part, or in a part behind, which is left to the end.
//
// Macros  BANK (float, Bf16, Fp16), STAGED (1: the chunk's weights pass through shared memory), THREADS (512, 768).
// Grid    (chunks of a full slab); a block beyond the last chunk has none.
// Block   THREADS threads.
// Reads   payload, sorted_slots [chunks, payload_row] (sorted_slots null: the records number every slot 0),
//         k_val [rows, W], q_val [rows, R], g [rows, gates] with gates 1 or W, beta [rows], lengths, cu_seqlens
//         (chunk.cuh).
// Writes  log_k, rex, k_eff, cpe [chunks, C, W], log_q, q_w [chunks, C, R], strength [chunks, C] (beta, 0 on padding);
//         flags [chunks, C, W] (bit 0: last K entry of its slot, bit 1: its only one); log_k, rex, cpe, log_q and flags
//         may be null.
//         Records in sorted order: write_entries, write_terms [chunks, C W], of K entries; slots [chunks,
//         min(C W, S)], slot_count [chunks]; partners [chunks, C (W + R)], of those entries alone that meet a write of
//         their token or an earlier one, and partner_at [chunks, C, W + R], where (-1: it meets none). Adds to
//         repeats[0] the K entries that repeat a slot of their token.
//         For a backward, else null: write_weight [chunks, C, W] (k_val exp(rex)); read_entries, read_terms [chunks,
//         C R], of Q entries; read_slots [chunks, min(C R, S)], read_slot_count [chunks]; slot_reads [chunks,
//         min(C W, S)], the first of the Q entries of each written slot and how many.
// Shared  static: the warps' parts and what they leave to the end. Dynamic, if STAGED: floats of the chunk, C (W + R),
//         on their way from input to sorted order (k_val, q_val) and back (k_eff, q_w), and for a backward C W of
//         write_weight: scattered words of many chunks would each cost a memory sector.
#include "chunk.cuh"
#include "entries.cuh"

#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

// The entries of one slot so far.
struct Run {
    LogDecay log;
    int writes, reads;
};
static __device__ __forceinline__ Run operator+(Run a, Run b) {
    return Run{a.log + b.log, a.writes + b.writes, a.reads + b.reads};
}

// What a part tells those behind it.
struct Part {
    Run open;                     // of the slot at its end, since its head; without a head, of the whole part
    int headed;                   // 1: it has a head
    int lead_writes, lead_reads;  // before its first head
    int writes;                   // all its K entries
    int slots, read_slots;        // slots written, and read, of those whose heads it has
};

// The end of a slot: tot, its first K entry and how many they are.
struct End {
    LogDecay total;
    int first, writes;
};

// The state of a walk before an entry.
struct Walk {
    Run open;  // of the slot that goes on
    int writes, slots, read_slots;

    __device__ __forceinline__ void pass(const Part& part) {
        slots += part.slots + (open.writes == 0 && part.lead_writes > 0 ? 1 : 0);
        read_slots += part.read_slots + (open.reads == 0 && part.lead_reads > 0 ? 1 : 0);
        writes += part.writes;
        open = part.headed ? part.open : open + part.open;
    }
};

// The lanes from the head of this lane's slot to this lane; all up to it where the slot began before the 32.
static __device__ __forceinline__ unsigned lanes_of_slot(unsigned heads, unsigned lanes_through) {
    const unsigned own = heads & lanes_through;
    return own == 0 ? lanes_through : lanes_through & ALL << (31 - __clz(static_cast<int>(own)));
}

static __device__ __forceinline__ long long warp_inclusive_sum(long long x) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const long long left = __shfl_up_sync(ALL, x, distance);
        if (lane >= distance) x += left;
    }
    return x;
}

// A record in one access.
template <class Record>
static __device__ __forceinline__ void store_record(Record* at, const Record& record) {
    uint4 bits;
    static_assert(sizeof(record) == sizeof(bits), "a record has 16 bytes");
    memcpy(&bits, &record, sizeof(bits));
    ptx::store_global(reinterpret_cast<uint4*>(at), bits);
}

extern "C" __global__ void __launch_bounds__(THREADS, STAGED ? 1024 / THREADS : 1)
    phase1_scan(const int* payload, const int* sorted_slots, const BANK* k_val, const BANK* q_val, const float* g,
                const float* beta, const void* lengths, const void* cu_seqlens, float* log_k, float* log_q, float* rex,
                float* cpe, float* k_eff, float* q_w, unsigned char* flags, float* strength, EntryRecord* write_entries,
                WriteTerm* write_terms, Partners* partners, int* partner_at, SlotRecord* slots, int* slot_count,
                unsigned long long* repeats, float* write_weight, EntryRecord* read_entries, ReadTerm* read_terms,
                ReadSlot* read_slots, int* read_slot_count, int2* slot_reads, int slab_step, int P, int T, int C, int W,
                int R, int S, int gates, int wide) {
    __shared__ Part parts[WARPS];
    __shared__ End ends[WARPS];  // of the slots that began in a part before and end in the warp's own; or no writes
    const long long n = blockIdx.x;
    if (n >= chunks_of_slab(slab_step, gridDim.x, P, T, C)) return;
    const Chunk chunk = chunk_at(static_cast<long long>(slab_step) * P + n, P, T, C, lengths, cu_seqlens, wide);
    const int entries = C * (W + R);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned lanes_before = (1u << lane) - 1, lanes_through = lanes_before << 1 | 1;
    const bool backward = write_weight != nullptr;
    {  // the chunk's own part of each array
        const long long slot_base = n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
        payload += n * payload_row(C, W, R);
        if (sorted_slots != nullptr) sorted_slots += n * payload_row(C, W, R);
        k_val += chunk.first_row * W, q_val += chunk.first_row * R;
        g += chunk.first_row * gates;
        write_entries += n * C * W, write_terms += n * C * W;
        k_eff += n * C * W, q_w += n * C * R;
        partners += n * entries, partner_at += n * entries;
        slots += slot_base;
        if (backward) {
            write_weight += n * C * W;
            read_entries += n * C * R, read_terms += n * C * R;
            read_slots += n * min(static_cast<long long>(C) * R, static_cast<long long>(S));
            slot_reads += slot_base;
        }
    }

    float* const k_out = STAGED ? ptx::dynamic_shared<float>() : k_eff;
    float* const q_out = STAGED ? k_out + C * W : q_w;
    float* const weight_out = STAGED ? q_out + C * R : write_weight;
    if (STAGED) {
        for (int i = threadIdx.x; i < chunk.tokens * W; i += THREADS) k_out[i] = to_float(k_val[i]);
        for (int i = threadIdx.x; i < chunk.tokens * R; i += THREADS) q_out[i] = to_float(q_val[i]);
    }
    for (int i = threadIdx.x; i < entries; i += THREADS) partner_at[i] = -1;
    for (int i = threadIdx.x; i < C; i += THREADS)
        strength[n * C + i] = i < chunk.tokens ? ptx::load_readonly(beta + chunk.first_row + i) : 0.0f;

    const auto code_at = [&](int at) { return at < entries ? ptx::load_readonly(payload + at) : 0; };
    const auto slot_of = [&](int code, int at) {
        return sorted_slots != nullptr && code & IS_VALID ? ptx::load_readonly(sorted_slots + at) : 0;
    };
    const auto value_of = [&](int code) {
        if (STAGED || !(code & IS_VALID)) return BANK{};
        const int token = entry_token(code);
        return code & IS_QUERY ? q_val[token * R + entry_lane(code)] : k_val[token * W + entry_lane(code)];
    };
    const auto gate_of = [&](int code) {
        if (!(code & IS_OWNER)) return 0.0f;
        return ptx::load_readonly(g + entry_token(code) * gates + (gates == 1 ? 0 : entry_lane(code)));
    };

    const int size = ((entries + WARPS - 1) / WARPS + 31) & ~31;
    const int begin = min(warp * size, entries), end = min(begin + size, entries);
    Part part{};
    int last_head = begin;
    for (int base = begin; base < end; base += 32) {
        const int code = code_at(base + lane);
        const bool valid = code & IS_VALID, write = valid && !(code & IS_QUERY), read = valid && code & IS_QUERY;
        const unsigned heads = __ballot_sync(ALL, code & IS_HEAD);
        const unsigned writes = __ballot_sync(ALL, write), reads = __ballot_sync(ALL, read);
        const unsigned slot_lanes = lanes_of_slot(heads, lanes_through);
        const bool began_here = heads & lanes_through, began = began_here || part.headed;
        const bool first_write =
            write && began && (writes & slot_lanes & lanes_before) == 0 && (began_here || part.open.writes == 0);
        const bool first_read =
            read && began && (reads & slot_lanes & lanes_before) == 0 && (began_here || part.open.reads == 0);
        part.slots += __popc(__ballot_sync(ALL, first_write));
        part.read_slots += __popc(__ballot_sync(ALL, first_read));
        part.writes += __popc(writes);
        const unsigned leading = part.headed ? 0 : heads == 0 ? ALL : (heads & -heads) - 1;
        part.lead_writes += __popc(writes & leading), part.lead_reads += __popc(reads & leading);
        const unsigned open = lanes_of_slot(heads, ALL);
        if (heads != 0) {
            part.headed = 1, part.open.writes = part.open.reads = 0;
            last_head = base + 31 - __clz(static_cast<int>(heads));
        }
        part.open.writes += __popc(writes & open), part.open.reads += __popc(reads & open);
    }
    for (int base = last_head; base < end; base += 32) {
        const int at = base + lane;
        const LogDecay x = gate_decay(at < end ? gate_of(code_at(at)) : 0.0f);
        part.open.log = part.open.log +
            LogDecay{__shfl_sync(ALL, warp_inclusive_sum(x.fixed), 31), __popc(__ballot_sync(ALL, x.erasures)),
                     __popc(__ballot_sync(ALL, x.nans))};
    }
    if (lane == 0) parts[warp] = part, ends[warp] = End{};
    __syncthreads();
    Walk walk{};
    for (int w = 0; w < warp; ++w) walk.pass(parts[w]);

    // What a K entry, the k-th, learns where its slot ends; returns k_val exp(rex).
    const auto finish = [&](int k, int code, float value, LogDecay l, const End& end) {
        const LogDecay rest = end.total - l;
        const int in_chunk = entry_token(code) * W + entry_lane(code);
        const long long out = static_cast<long long>(blockIdx.x) * C * W + in_chunk;
        const float weight = value * exp_of(rest);
        if (backward) weight_out[in_chunk] = weight;
        if (rex != nullptr) rex[out] = log_of(rest);
        if (cpe != nullptr) cpe[out] = exp_of(end.total);
        if (flags != nullptr) flags[out] = (k == end.first + end.writes - 1 ? 1 : 0) | (end.writes == 1 ? 2 : 0);
        return weight;
    };
    // Finishes the K entries from..to of one slot, which have been recorded.
    const auto finish_recorded = [&](int from, int to, const End& end) {
        for (int k = from + lane; k < to; k += 32) {
            const EntryRecord entry = write_entries[k];
            write_terms[k].weight = finish(k, write_terms[k].code, entry.weight, entry.log(), end);
        }
    };

    const int writes_before_part = walk.writes;
    // Codes are fetched two steps ahead, weights and gates one.
    int code = code_at(begin + lane), next_code = code_at(begin + 32 + lane);
    BANK next_value = value_of(code);
    float next_gate = gate_of(code);
    for (int base = begin; base < end; base += 32) {
        const int at = base + lane;
        const int upcoming = code_at(at + 64);
        const BANK fetched = next_value;
        const float gate = next_gate;
        const int place = slot_of(code, at);
        next_value = value_of(next_code), next_gate = gate_of(next_code);
        const int token = entry_token(code), in_token = entry_lane(code);
        const bool valid = code & IS_VALID, query = code & IS_QUERY, write = valid && !query, read = valid && query;
        float* const out = (query ? q_out + token * R : k_out + token * W) + in_token;

        // The slot up to this entry.
        const LogDecay x = gate_decay(gate);  // of no owner: 0
        const unsigned heads = __ballot_sync(ALL, code & IS_HEAD);
        const unsigned writes = __ballot_sync(ALL, write), reads = __ballot_sync(ALL, read);
        const unsigned erasures = __ballot_sync(ALL, x.erasures), nans = __ballot_sync(ALL, x.nans);
        const unsigned slot_lanes = lanes_of_slot(heads, lanes_through), head = heads & lanes_through;
        const long long sum = warp_inclusive_sum(x.fixed);
        const int head_lane = head == 0 ? 0 : 31 - __clz(static_cast<int>(head));
        const long long before_head = __shfl_sync(ALL, sum - x.fixed, head_lane);
        Run run{{head == 0 ? sum : sum - before_head, __popc(erasures & slot_lanes), __popc(nans & slot_lanes)},
                __popc(writes & slot_lanes),
                __popc(reads & slot_lanes)};
        if (head == 0) run = walk.open + run;
        const LogDecay l = run.log;

        // Its number among the K entries, its slot's among those written and read.
        const bool first_write = write && run.writes == 1, first_read = read && run.reads == 1;
        const unsigned slot_votes = __ballot_sync(ALL, first_write), read_slot_votes = __ballot_sync(ALL, first_read);
        const int k = walk.writes + __popc(writes & lanes_before), k_through = k + (write ? 1 : 0);
        const int slot = walk.slots + __popc(slot_votes & lanes_through) - 1;
        const int read_slot = walk.read_slots + __popc(read_slot_votes & lanes_through) - 1;
        const int first = k_through - run.writes, first_query = at + 1 - k_through - run.reads;

        // The end of its slot, where it is among the 32.
        int after = __shfl_down_sync(ALL, code, 1);
        const int beyond = __shfl_sync(ALL, next_code, 0);
        if (lane == 31) after = beyond;
        const bool last = valid && (!(after & IS_VALID) || after & IS_HEAD);
        const unsigned lasts = __ballot_sync(ALL, last), own_last = lasts & ~lanes_before;
        const int last_lane = own_last == 0 ? 0 : __ffs(static_cast<int>(own_last)) - 1;
        const auto end_at = [&](int lane, int first) {
            return End{
                {__shfl_sync(ALL, l.fixed, lane), __shfl_sync(ALL, l.erasures, lane), __shfl_sync(ALL, l.nans, lane)},
                first,
                __shfl_sync(ALL, run.writes, lane)};
        };
        const End own_end = end_at(last_lane, first);

        if (at < entries) {
            const float value = STAGED ? (valid ? *out : 0.0f) : to_float(fetched);
            const float decay = exp_of(l);
            const float weight = valid ? value * decay : 0.0f;
            *out = weight;
            if (query && log_q != nullptr) log_q[n * C * R + token * R + in_token] = valid ? log_of(l) : 0.0f;
            if (!query) {
                const int in_chunk = token * W + in_token;
                if (log_k != nullptr) log_k[n * C * W + in_chunk] = valid ? log_of(l) : 0.0f;
                if (!valid) {
                    if (backward) weight_out[in_chunk] = 0.0f;
                    if (rex != nullptr) rex[n * C * W + in_chunk] = 0.0f;
                    if (cpe != nullptr) cpe[n * C * W + in_chunk] = 0.0f;
                    if (flags != nullptr) flags[n * C * W + in_chunk] = 0;
                }
            }
            if (valid && run.writes > (write ? 1 : 0)) {
                store_record(partners + at, Partners::of(l, first, run.writes));
                partner_at[token * (W + R) + (query ? W : 0) + in_token] = at;
            }
            const int term_code = code & (LANE_MASK | TOKEN_MASK << TOKEN_SHIFT);
            if (write) {
                float finished = 0.0f;
                if (own_last != 0) finished = finish(k, code, value, l, own_end);
                store_record(write_entries + k, EntryRecord::of(l, value, token));
                store_record(write_terms + k, WriteTerm{finished, weight, term_code, slot});
                if (!(code & IS_OWNER)) atomicAdd(repeats, 1ull);
            } else if (valid && backward) {
                store_record(read_entries + at - k, EntryRecord::of(l, value, token));
                store_record(read_terms + at - k, ReadTerm{weight, term_code, first, run.writes});
            }
            if (last && run.writes > 0) {
                store_record(slots + slot, SlotRecord{place, first, run.writes, decay});
                if (backward) slot_reads[slot] = make_int2(first_query, run.reads);
            }
            if (last && backward && run.reads > 0)
                store_record(read_slots + read_slot, ReadSlot{place, first_query, run.reads, run.writes > 0 ? 1 : 0});
        }

        // The slot that went on from before, where it ends here: its K entries before the 32.
        __syncwarp();
        const unsigned first_head = heads == 0 ? ALL : (heads & -heads) - 1;
        if ((lasts & first_head) != 0 && walk.open.writes > 0) {
            const End end = end_at(__ffs(static_cast<int>(lasts)) - 1, walk.writes - walk.open.writes);
            finish_recorded(max(end.first, writes_before_part), walk.writes, end);
            if (lane == 0 && end.first < writes_before_part) ends[warp] = end;
        }

        walk.open = Run{{__shfl_sync(ALL, l.fixed, 31), __shfl_sync(ALL, l.erasures, 31), __shfl_sync(ALL, l.nans, 31)},
                        __shfl_sync(ALL, run.writes, 31),
                        __shfl_sync(ALL, run.reads, 31)};
        walk.writes += __popc(writes), walk.slots += __popc(slot_votes), walk.read_slots += __popc(read_slot_votes);
        code = next_code, next_code = upcoming;
    }

    if (threadIdx.x == THREADS - 1) {  // of the last part
        slot_count[n] = walk.slots;
        if (backward) read_slot_count[n] = walk.read_slots;
    }
    __syncthreads();
    const End found = ends[warp];
    if (found.writes > 0) finish_recorded(found.first, writes_before_part, found);
    if (STAGED) {
        __syncthreads();
        for (int i = threadIdx.x; i < C * W; i += THREADS) k_eff[i] = k_out[i];
        for (int i = threadIdx.x; i < C * R; i += THREADS) q_w[i] = q_out[i];
        if (backward)
            for (int i = threadIdx.x; i < C * W; i += THREADS) write_weight[i] = weight_out[i];
    }
}
