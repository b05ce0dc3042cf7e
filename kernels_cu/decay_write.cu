// Ends a step: decays and writes the rows of the chunk's slots, keeping what they held where training asks for it.
//
//     M1[s] = cpe(s) M0[s] + sum over K entries e of s of k_val_e exp(rex_e) delta[token(e)]
//
// A block has delta of one column slice in shared memory; teams of LANES threads, a word of 16 bytes a thread, take
// slots of the slice in turn, so a row's slice has one writer. Rows are rounded to the bank's format once.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (bank values of one load: a word or 1), LANES (threads across a slice: 16, or
//         8 where delta of a wider slice does not fit), SNAPSHOT (0 none kept, 1 in the bank's format, 2 Bf16).
// Grid    (blocks that share the slots, P streams, slices of LANES words).
// Block   THREADS threads.
// Reads   delta [P, C, D]; slots [chunks, capacity], slot_count [chunks], write_terms [chunks, C W] of the slab;
//         capacity = min(C W, S).
// Writes  rows of memory [P*S, D] (row_stride values apart); snapshot [all chunks, capacity, D], row j for slot j.
// Sums    terms in sorted order (token, then lane) onto the decayed row.
// Shared  dynamic: delta of the slice, [C, COLUMNS] floats.
#include "entries.cuh"
#define LOADS 1
#include "rows.cuh"
#undef LOADS

#define THREADS 512
#define TEAMS (THREADS / LANES)
#define AHEAD (VECTOR == 1 ? 2 : 6)  // slots of a team under way at once
#define COLUMNS (LANES * WORD)
#define PLANES (WORD / 4)

// Rows of delta lie in planes of four columns a word: the threads of a team read neighbouring words.
static __device__ __forceinline__ float* plane(float* delta, int token, int column) {
    return delta + token * COLUMNS + column / 4 % PLANES * (COLUMNS / PLANES) + column / WORD * 4;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decay_write(BANK* memory, const float* delta, const SlotRecord* slots, const int* slot_count,
                const WriteTerm* write_terms, void* snapshot, long long row_stride, int step, int slab_step, int P,
                int C, int W, int S, int D, int shared_bank) {
    float* const held = ptx::dynamic_shared<float>();  // [C, COLUMNS]
    const int p = blockIdx.y, first = blockIdx.z * COLUMNS, lane = threadIdx.x % LANES;
    const int column = first + lane * WORD, stride = gridDim.x * TEAMS;
    const long long n = static_cast<long long>(step - slab_step) * P + p;
    const long long capacity = min(static_cast<long long>(C) * W, static_cast<long long>(S));
    const long long kept = (static_cast<long long>(step) * P + p) * capacity;
    const int count = slot_count[n];
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
    BANK* const rows = memory + first_slot * row_stride;
    delta += static_cast<long long>(p) * C * D;
    slots += n * capacity;
    write_terms += n * C * W;

    // Slots, terms and rows are older than the launch before this one: delta alone is not.
    const int begin = blockIdx.x * TEAMS + threadIdx.x / LANES;
    SlotRecord slot[AHEAD];
    WriteTerm term[AHEAD];
    RowSlice<BANK> row[AHEAD];
    const auto load = [&](int j) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int at = j + a * stride;
            slot[a] = at < count ? slots[at] : SlotRecord{0, 0, 0, 0.0f};
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (slot[a].count > 0) {
                row[a].load(rows + slot[a].slot * row_stride, column, D);
                term[a] = write_terms[slot[a].first];
            }
    };
    load(begin);
    ptx::pdl_wait();
    for (int cell = threadIdx.x; cell < C * (COLUMNS / 4); cell += THREADS) {
        const int token = cell / (COLUMNS / 4), at = cell % (COLUMNS / 4) * 4;
        const float* const from = delta + static_cast<long long>(token) * D + first + at;
        float* const to = plane(held, token, at);
        if (D % 4 == 0 && first + at < D) {
            ptx::copy_async_16(to, from);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (first + at + c < D)
                    ptx::copy_async_4(to + c, from + c);
                else
                    to[c] = 0.0f;
            }
        }
    }
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncthreads();

    for (int j = begin; j < count; j += AHEAD * stride) {
        if (j > begin) load(j);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (slot[a].count == 0) break;
            float value[WORD];
            row[a].word(0, value);
#if SNAPSHOT == 1
            row[a].store(static_cast<BANK*>(snapshot) + (kept + j + a * stride) * D, column, D);
#elif SNAPSHOT == 2
            store_word(static_cast<Bf16*>(snapshot) + (kept + j + a * stride) * D, column, D, value);
#endif
#pragma unroll
            for (int c = 0; c < WORD; ++c) value[c] *= slot[a].cpe;
            WriteTerm now = term[a];
            for (int e = 0; e < slot[a].count; ++e) {
                const WriteTerm next = write_terms[slot[a].first + min(e + 1, slot[a].count - 1)];
#pragma unroll
                for (int h = 0; h < PLANES; ++h) {
                    const float4 change =
                        *reinterpret_cast<const float4*>(plane(held, now.token(), lane * WORD + 4 * h));
                    value[4 * h] = fmaf(now.weight, change.x, value[4 * h]);
                    value[4 * h + 1] = fmaf(now.weight, change.y, value[4 * h + 1]);
                    value[4 * h + 2] = fmaf(now.weight, change.z, value[4 * h + 2]);
                    value[4 * h + 3] = fmaf(now.weight, change.w, value[4 * h + 3]);
                }
                now = next;
            }
            store_word(rows + slot[a].slot * row_stride, column, D, value);
        }
    }
}
