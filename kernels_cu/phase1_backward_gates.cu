// Phase-1 backward, the gradients of weights and gates from the sums over pairs (phase1_backward_pairs.cu). With w the
// weight of an entry:
//
//     grad_k_val = value_sums + d_k_eff exp(L) + d_k_pd exp(rex)          grad_q_val = value_sums + d_q_w exp(L)
//     dl(K) = log_sums + d_k_eff w exp(L)     dl(Q) = log_sums + d_q_w w exp(L)     dr(K) = d_k_pd w exp(rex)
//     grad_x(e) = sum of dl over the slot's entries at e's token or later + sum of dr over its K entries before e
//                 + d_tot(slot)
//
// grad_x belongs to the owner entry, the first K entry of its slot and token. It is 0 for a gate of -inf, for repeats
// and for entries that are absent or padded; so are the gradients of their weights.
//
// Macros  BANK (float, Bf16, Fp16).
// Grid    (chunks): a chunk a block.
// Block   THREADS threads: an entry each, then a written slot each.
// Reads   write_entries, write_terms [chunks, C W], read_entries, read_terms [chunks, C R], slots, slot_reads [chunks,
//         min(C W, S)], slot_count [chunks], read_slots [chunks, min(C R, S)], read_slot_count [chunks] (entries.cuh);
//         d_k_eff, d_k_pd [chunks, C, W], d_q_w [chunks, C, R]; d_tot [chunks, min(C W, S)], by written slot, or null:
//         0; given_log_k, given_rex [chunks, C, W], given_log_q [chunks, C, R], the floats that exp(L) and exp(rex) are
//         taken of, or all null: they are taken of the records, exactly; lengths, cu_seqlens (chunk.cuh).
// Writes  grad_k_val [rows, W], grad_q_val [rows, R], grad_g [rows, grad_gates] with grad_gates W, or 1: summed over
//         the token's writes. value_sums, log_sums [chunks, C (W + R)], of phase1_backward_pairs.cu, become dr and dl,
//         then of slots with several K entries dr becomes the sum before each. gate_gradients [chunks, C, W] is
//         scratch, used where they are summed, without stage_outputs.
// Sums    grad_x: compensated; dl from the slot's last token down, in a token its K entries, then its Q entries, each
//         from the last; then the sum of dr, then d_tot. Over a token's writes: lane l of a warp takes writes l,
//         l + 32, .., compensated, then a butterfly.
// Shared  dynamic, with stage_outputs: grad_k_val, then grad_q_val, then grad_x of the chunk, one after the other on
//         their way from sorted to token order. The largest of the three.
#include "chunk.cuh"
#include "phase1_backward.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

template <class T>
static __device__ __forceinline__ void clear(T* x, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS) x[i] = from_float<T>(0.0f);
}

// Copies out what the block has staged, in words of 16 bytes where `to` lies on one.
template <class T>
static __device__ __forceinline__ void copy_out(T* to, const T* staged, int count) {
    constexpr int VALUES = 16 / sizeof(T);
    int done = 0;
    if (reinterpret_cast<unsigned long long>(to) % 16 == 0) {
        const int words = count / VALUES;
        for (int i = threadIdx.x; i < words; i += THREADS)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(staged)[i];
        done = words * VALUES;
    }
    for (int i = done + threadIdx.x; i < count; i += THREADS) to[i] = staged[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    phase1_backward_gates(const EntryRecord* write_entries, const WriteTerm* write_terms,
                          const EntryRecord* read_entries, const ReadTerm* read_terms, const SlotRecord* slots,
                          const int2* slot_reads, const int* slot_count, const ReadSlot* read_slots,
                          const int* read_slot_count, const float* given_log_k, const float* given_log_q,
                          const float* given_rex, const float* d_k_eff, const float* d_k_pd, const float* d_q_w,
                          const float* d_tot, const void* lengths, const void* cu_seqlens, float* value_sums,
                          float* log_sums, float* gate_gradients, BANK* grad_k_val, BANK* grad_q_val, float* grad_g,
                          int P, int T, int C, int W, int R, int S, int grad_gates, int wide, int stage_outputs) {
    const long long n = blockIdx.x;
    const Chunk chunk = chunk_at(n, P, T, C, lengths, cu_seqlens, wide);
    const long long k_base = n * C * W, q_base = n * C * R;
    const long long slot_base = n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
    write_entries += k_base, write_terms += k_base;
    read_entries += q_base, read_terms += q_base;
    slots += slot_base, slot_reads += slot_base;
    read_slots += n * min(static_cast<long long>(C) * R, static_cast<long long>(S));
    value_sums += k_base + q_base, log_sums += k_base + q_base;
    float* const read_value_sums = value_sums + C * W;
    float* const read_log_sums = log_sums + C * W;
    grad_k_val += chunk.first_row * W, grad_q_val += chunk.first_row * R, grad_g += chunk.first_row * grad_gates;
    const int written = slot_count[n];
    const int writes = entries_of(slots, written), reads = entries_of(read_slots, read_slot_count[n]);
    const bool summed = grad_gates < W;  // over the token's writes
    BANK* const staged_values = ptx::dynamic_shared<BANK>();

    BANK* const k_out = stage_outputs ? staged_values : grad_k_val;
    clear(k_out, (stage_outputs ? C : chunk.rows) * W);
    __syncthreads();
    for (int k = threadIdx.x; k < writes; k += THREADS) {
        const WriteTerm term = write_terms[k];
        const EntryRecord entry = write_entries[k];
        const int in_chunk = term.token() * W + entry_lane(term.code);
        float to, after;  // exp(L), exp(rex)
        if (given_log_k != nullptr) {
            to = exp_decay(given_log_k[k_base + in_chunk]);
            after = exp_decay(given_rex[k_base + in_chunk]);
        } else {
            const SlotRecord slot = slots[term.slot];
            to = exp_of(entry.log());
            after = exp_of(write_entries[slot.first + slot.count - 1].log() - entry.log());
        }
        const float start = d_k_eff[k_base + in_chunk] * to, end = d_k_pd[k_base + in_chunk] * after;
        k_out[in_chunk] = from_float<BANK>(value_sums[k] + start + end);
        log_sums[k] += entry.weight * start;
        value_sums[k] = entry.weight * end;
    }
    if (stage_outputs) {
        __syncthreads();
        copy_out(grad_k_val, staged_values, chunk.rows * W);
        __syncthreads();
    }

    BANK* const q_out = stage_outputs ? staged_values : grad_q_val;
    clear(q_out, (stage_outputs ? C : chunk.rows) * R);
    __syncthreads();
    for (int q = threadIdx.x; q < reads; q += THREADS) {
        const ReadTerm term = read_terms[q];
        const EntryRecord entry = read_entries[q];
        const int in_chunk = term.token() * R + entry_lane(term.code);
        const float to = given_log_q != nullptr ? exp_decay(given_log_q[q_base + in_chunk]) : exp_of(entry.log());
        const float start = d_q_w[q_base + in_chunk] * to;
        q_out[in_chunk] = from_float<BANK>(read_value_sums[q] + start);
        read_log_sums[q] += entry.weight * start;
    }
    if (stage_outputs) {
        __syncthreads();
        copy_out(grad_q_val, staged_values, chunk.rows * R);
        __syncthreads();
    }

    float* x_out = grad_g;
    if (stage_outputs)
        x_out = ptx::dynamic_shared<float>();
    else if (summed)
        x_out = gate_gradients + k_base;
    clear(x_out, (stage_outputs || summed ? C : chunk.rows) * W);
    __syncthreads();
    for (int s = threadIdx.x; s < written; s += THREADS) {
        const SlotRecord slot = slots[s];
        const int2 span = slot_reads[s];
        const float d_total = d_tot != nullptr ? d_tot[slot_base + s] : 0.0f;
        if (slot.count > 1) {
            CompensatedSum before = empty_sum();
            for (int k = slot.first; k < slot.first + slot.count; ++k) {
                const float dr = value_sums[k];
                value_sums[k] = before.total();
                before.add(dr);
            }
        }
        CompensatedSum from_here = empty_sum();
        int q = span.x + span.y;
        int code = write_terms[slot.first + slot.count - 1].code;
        LogDecay log = write_entries[slot.first + slot.count - 1].log();
        for (int k = slot.first + slot.count - 1; k >= slot.first; --k) {
            const bool first = k == slot.first;
            const int code_before = first ? 0 : write_terms[k - 1].code;
            const LogDecay log_before = first ? no_decay() : write_entries[k - 1].log();
            const int token = entry_token(code);
            from_here.add(log_sums[k]);
            if (first || entry_token(code_before) != token) {
                for (; q > span.x && read_terms[q - 1].token() >= token; --q) from_here.add(read_log_sums[q - 1]);
                CompensatedSum gradient = from_here;
                if (slot.count > 1) gradient.add(value_sums[k]);
                gradient.add(d_total);
                const bool erases = log.erasures != log_before.erasures;
                x_out[token * W + entry_lane(code)] = erases ? 0.0f : gradient.total();
            }
            code = code_before;
            log = log_before;
        }
    }

    if (stage_outputs || summed) __syncthreads();
    if (summed) {
        const int lane = threadIdx.x & 31;
        for (int token = threadIdx.x >> 5; token < chunk.rows; token += WARPS) {
            CompensatedSum sum = empty_sum();
            for (int m = lane; m < W; m += 32) sum.add(x_out[token * W + m]);
            const float total = warp_sum(sum.total());
            if (lane == 0) grad_g[token] = total;
        }
    } else if (stage_outputs) {
        copy_out(grad_g, x_out, chunk.rows * W);
    }
}
