// Ends a step: decays and writes the rows of the chunk's slots, keeping what they held where training asks for it.
//
//     M1[s] = cpe(s) M0[s] + sum over K entries e of s of k_val_e exp(rex_e) delta[token(e)]
//
// A block has delta of one column slice in shared memory; teams of LANES threads, a word of 16 bytes a thread, take
// slots of the slice in turn, so a row's slice has one writer. Rows are rounded to the bank's format once. A warp goes
// through units of UNIT slots: while one is finished, the rows of the next and the records of the one behind it are on
// their way.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (bank values of one load: a word or 1), LANES (threads across a slice: 16, or
//         8 where delta of a wider slice does not fit), SNAPSHOT (0 none kept, 1 in the bank's format, 2 Bf16).
// Grid    (blocks that share the slots, P streams, slices of LANES words).
// Block   THREADS threads.
// Reads   delta [P, C, D]; slots [chunks, capacity], slot_count [chunks], write_terms [chunks, C W] of the slab;
//         capacity = min(C W, S).
// Writes  rows of memory [P*S, D] (row_stride values apart); snapshot [all chunks, capacity, D], row j for slot j.
// Sums    terms in sorted order (token, then lane) onto the decayed row.
// Shared  dynamic: delta of the slice, [C, COLUMNS] floats; first terms and records of two units a warp, 24 bytes a slot.
#include "entries.cuh"
#define LOADS 1
#include "rows.cuh"
#undef LOADS

#define THREADS 512
#define WARPS (THREADS / 32)
#define TEAMS (32 / LANES)          // of a warp
#define ROWS (VECTOR == 1 ? 2 : 8)  // slots of a team in a unit
#define UNIT (TEAMS * ROWS)         // slots of a warp in a unit
#define TERMS 4                     // of a slot under way at once, behind the first
#define COLUMNS (LANES * WORD)
#define PLANES (WORD / 4)

struct __align__(8) FirstTerm {
    float weight;
    int token;
};

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
    const int warp = threadIdx.x / 32, at_lane = threadIdx.x % 32, team = at_lane / LANES;
    FirstTerm* const all_terms = reinterpret_cast<FirstTerm*>(held + C * COLUMNS);
    FirstTerm* const terms = all_terms + warp * 2 * UNIT;  // [2, UNIT]
    SlotRecord* const records =
        reinterpret_cast<SlotRecord*>(all_terms + WARPS * 2 * UNIT) + warp * 2 * UNIT;  // the same
    const int column = first + lane * WORD;
    const long long n = static_cast<long long>(step - slab_step) * P + p;
    const long long capacity = min(static_cast<long long>(C) * W, static_cast<long long>(S));
    const long long kept = (static_cast<long long>(step) * P + p) * capacity;
    const int count = slot_count[n];
    const long long first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
    BANK* const rows = memory + first_slot * row_stride;
    delta += static_cast<long long>(p) * C * D;
    slots += n * capacity;
    write_terms += n * C * W;

    const auto first_of = [&](int unit) {
        return ((unit * WARPS + warp) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * UNIT;
    };
    const auto place_of = [](int unit) { return (unit + 1) % 2 * UNIT; };
    // A slot a lane; count is 0 where there is none.
    const auto load_record = [&](int unit) {
        const int j = first_of(unit) + at_lane;
        return at_lane < UNIT && j < count ? slots[j] : SlotRecord{0, 0, 0, 0.0f};
    };
    const auto load_term = [&](const SlotRecord& record) {
        if (record.count == 0) return FirstTerm{0.0f, 0};
        const WriteTerm term = write_terms[record.first];
        return FirstTerm{term.weight, term.token()};
    };
    using Rows = RowSlice<BANK>[ROWS];
    // Starts to load the rows of a unit, whose records the lanes hold.
    const auto start = [&](int unit, const SlotRecord& record, Rows& row) {
        const SlotRecord* const of_unit = records + place_of(unit);
        if (at_lane < UNIT) records[place_of(unit) + at_lane] = record;
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const SlotRecord& of_row = of_unit[r * TEAMS + team];
            if (of_row.count > 0) row[r].load(rows + of_row.slot * row_stride, column, D);
        }
    };
    const auto add = [&](float (&value)[WORD], float weight, int token) {
#pragma unroll
        for (int h = 0; h < PLANES; ++h) {
            const float4 change = *reinterpret_cast<const float4*>(plane(held, token, lane * WORD + 4 * h));
            value[4 * h] = fmaf(weight, change.x, value[4 * h]);
            value[4 * h + 1] = fmaf(weight, change.y, value[4 * h + 1]);
            value[4 * h + 2] = fmaf(weight, change.z, value[4 * h + 2]);
            value[4 * h + 3] = fmaf(weight, change.w, value[4 * h + 3]);
        }
    };
    const auto finish = [&](int unit, const Rows& row) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int at = r * TEAMS + team;
            const SlotRecord record = records[place_of(unit) + at];
            if (record.count == 0) continue;
            float value[WORD];
            row[r].word(0, value);
#if SNAPSHOT == 1
            row[r].store(static_cast<BANK*>(snapshot) + (kept + first_of(unit) + at) * D, column, D);
#elif SNAPSHOT == 2
            store_word(static_cast<Bf16*>(snapshot) + (kept + first_of(unit) + at) * D, column, D, value);
#endif
#pragma unroll
            for (int c = 0; c < WORD; ++c) value[c] *= record.cpe;
            const FirstTerm term = terms[place_of(unit) + at];
            add(value, term.weight, term.token);
            for (int e = 1; e < record.count; e += TERMS) {
                WriteTerm more[TERMS];
#pragma unroll
                for (int k = 0; k < TERMS; ++k) more[k] = write_terms[record.first + min(e + k, record.count - 1)];
#pragma unroll
                for (int k = 0; k < TERMS; ++k)
                    if (e + k < record.count) add(value, more[k].weight, more[k].token());
            }
            store_word(rows + record.slot * row_stride, column, D, value);
        }
    };

    // Slots, terms and rows are older than the launch before this one: delta alone is not.
    Rows even, odd;
    SlotRecord next = load_record(0);
    FirstTerm term = load_term(next);
    start(0, next, even);
    next = load_record(1);
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

    const auto advance = [&](int unit, const Rows& row, Rows& following) {
        __syncwarp();
        if (at_lane < UNIT) terms[place_of(unit) + at_lane] = term;
        start(unit + 1, next, following);
        term = load_term(next);
        next = load_record(unit + 2);
        finish(unit, row);
    };
    for (int unit = 0; first_of(unit) < count; unit += 2) {
        advance(unit, even, odd);
        if (first_of(unit + 1) < count) advance(unit + 1, odd, even);
    }
}
