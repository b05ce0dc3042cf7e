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
// Block   a multiple of 32 threads, up to MOST_THREADS: an entry each, then a written slot each.
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
// Shared  static: the list of slots with several entries. Dynamic, with stage_outputs: grad_k_val, then grad_q_val, then
//         grad_x of the chunk, one after the other on their way from sorted to token order. The largest of the three.
#include "chunk.cuh"
#include "phase1_backward.cuh"

#define MOST_THREADS 512
#define BATCH 4      // entries or slots of a thread under way at once
#define LISTED 4096  // slots looked at before those on the list

template <class T>
static __device__ __forceinline__ void clear(T* x, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = from_float<T>(0.0f);
}

// Copies out what the block has staged, in words of 16 bytes where `to` lies on one.
template <class T>
static __device__ __forceinline__ void copy_out(T* to, const T* staged, int count) {
    constexpr int VALUES = 16 / sizeof(T);
    int done = 0;
    if (reinterpret_cast<unsigned long long>(to) % 16 == 0) {
        const int words = count / VALUES;
        for (int i = threadIdx.x; i < words; i += blockDim.x)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(staged)[i];
        done = words * VALUES;
    }
    for (int i = done + threadIdx.x; i < count; i += blockDim.x) to[i] = staged[i];
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    phase1_backward_gates(const EntryRecord* write_entries, const WriteTerm* write_terms,
                          const EntryRecord* read_entries, const ReadTerm* read_terms, const SlotRecord* slots,
                          const int2* slot_reads, const int* slot_count, const ReadSlot* read_slots,
                          const int* read_slot_count, const float* given_log_k, const float* given_log_q,
                          const float* given_rex, const float* d_k_eff, const float* d_k_pd, const float* d_q_w,
                          const float* d_tot, const void* lengths, const void* cu_seqlens, float* value_sums,
                          float* log_sums, float* gate_gradients, BANK* grad_k_val, BANK* grad_q_val, float* grad_g,
                          int P, int T, int C, int W, int R, int S, int grad_gates, int wide, int stage_outputs) {
    __shared__ unsigned short list[LISTED];
    __shared__ int listed;
    const long long n = blockIdx.x;
    const int threads = blockDim.x;
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
    // What is not given is loaded from elsewhere and not used: no branch parts the loads of a batch.
    const bool given = given_log_k != nullptr;
    const float* const log_k = given ? given_log_k : d_k_eff;
    const float* const log_q = given ? given_log_q : d_q_w;
    const float* const rex = given ? given_rex : d_k_pd;

    // Batches of loads before their stores, here and below: the compiler may not move one across the other.
    for (int base = threadIdx.x; base < writes; base += BATCH * threads) {
        WriteTerm term[BATCH];
        EntryRecord entry[BATCH], last[BATCH];  // of the slot
        float start[BATCH], end[BATCH], value_sum[BATCH], log_sum[BATCH], to[BATCH], after[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int k = base + b * threads < writes ? base + b * threads : base;
            term[b] = write_terms[k], entry[b] = write_entries[k];
            value_sum[b] = value_sums[k], log_sum[b] = log_sums[k];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const long long at = k_base + term[b].token() * W + entry_lane(term[b].code);
            start[b] = d_k_eff[at], end[b] = d_k_pd[at];
            to[b] = log_k[at], after[b] = rex[at];
            const SlotRecord slot = slots[term[b].slot];
            last[b] = write_entries[slot.first + slot.count - 1];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int k = base + b * threads;
            if (k >= writes) break;
            const LogDecay log = entry[b].log();
            start[b] *= given ? exp_decay(to[b]) : exp_of(log);
            end[b] *= given ? exp_decay(after[b]) : exp_of(last[b].log() - log);
            k_out[term[b].token() * W + entry_lane(term[b].code)] = from_float<BANK>(value_sum[b] + start[b] + end[b]);
            log_sums[k] = log_sum[b] + entry[b].weight * start[b];
            value_sums[k] = entry[b].weight * end[b];
        }
    }
    if (stage_outputs) {
        __syncthreads();
        copy_out(grad_k_val, staged_values, chunk.rows * W);
        __syncthreads();
    }

    BANK* const q_out = stage_outputs ? staged_values : grad_q_val;
    clear(q_out, (stage_outputs ? C : chunk.rows) * R);
    __syncthreads();
    for (int base = threadIdx.x; base < reads; base += BATCH * threads) {
        ReadTerm term[BATCH];
        EntryRecord entry[BATCH];
        float start[BATCH], value_sum[BATCH], log_sum[BATCH], to[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int q = base + b * threads < reads ? base + b * threads : base;
            term[b] = read_terms[q], entry[b] = read_entries[q];
            value_sum[b] = read_value_sums[q], log_sum[b] = read_log_sums[q];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const long long at = q_base + term[b].token() * R + entry_lane(term[b].code);
            start[b] = d_q_w[at], to[b] = log_q[at];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int q = base + b * threads;
            if (q >= reads) break;
            start[b] *= given ? exp_decay(to[b]) : exp_of(entry[b].log());
            q_out[term[b].token() * R + entry_lane(term[b].code)] = from_float<BANK>(value_sum[b] + start[b]);
            read_log_sums[q] = log_sum[b] + entry[b].weight * start[b];
        }
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
    // Slots with one K entry and at most one Q entry at once; the others, which take turns, go on a list.
    for (int tile = 0; tile < written; tile += LISTED) {
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        const int tile_end = min(tile + LISTED, written);
        for (int base = tile + threadIdx.x; base < tile_end; base += BATCH * threads) {
            SlotRecord slot[BATCH];
            int2 span[BATCH];
            float d_total[BATCH], sum[BATCH], read_sum[BATCH];
            int code[BATCH], read_token[BATCH];
            bool erases[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int s = base + b * threads < tile_end ? base + b * threads : base;
                slot[b] = slots[s], span[b] = slot_reads[s];
                d_total[b] = d_tot != nullptr ? d_tot[slot_base + s] : 0.0f;
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int k = slot[b].first;
                code[b] = write_terms[k].code, sum[b] = log_sums[k];
                erases[b] = write_entries[k].log().erasures != 0;
                read_token[b] = -1, read_sum[b] = 0.0f;
                if (span[b].y == 1)
                    read_token[b] = read_terms[span[b].x].token(), read_sum[b] = read_log_sums[span[b].x];
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int s = base + b * threads, token = entry_token(code[b]);
                if (s >= tile_end) break;
                if (slot[b].count > 1 || span[b].y > 1) {
                    list[atomicAdd(&listed, 1)] = static_cast<unsigned short>(s - tile);
                    continue;
                }
                CompensatedSum gradient = empty_sum();
                gradient.add(sum[b]);
                if (read_token[b] >= token) gradient.add(read_sum[b]);
                gradient.add(d_total[b]);
                x_out[token * W + entry_lane(code[b])] = erases[b] ? 0.0f : gradient.total();
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < listed; i += blockDim.x) {
            const int s = tile + list[i];
            const SlotRecord slot = slots[s];
            const int2 span = slot_reads[s];
            const float d_total = d_tot != nullptr ? d_tot[slot_base + s] : 0.0f;
            const int last = slot.first + slot.count - 1;
            if (slot.count > 1) {
                CompensatedSum before = empty_sum();
                for (int k = slot.first; k <= last; ++k) {
                    const float dr = value_sums[k];
                    value_sums[k] = before.total();
                    before.add(dr);
                }
            }
            CompensatedSum from_here = empty_sum();
            int q = span.x + span.y, code = write_terms[last].code;
            LogDecay log = write_entries[last].log();
            for (int k = last; k >= slot.first; --k) {
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
        __syncthreads();
    }

    if (summed) {
        const int lane = threadIdx.x & 31;
        for (int token = threadIdx.x >> 5; token < chunk.rows; token += blockDim.x / 32) {
            CompensatedSum sum = empty_sum();
            for (int m = lane; m < W; m += 32) sum.add(x_out[token * W + m]);
            const float total = warp_sum(sum.total());
            if (lane == 0) grad_g[token] = total;
        }
    } else if (stage_outputs) {
        copy_out(grad_g, x_out, chunk.rows * W);
    }
}
