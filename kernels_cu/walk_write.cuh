// Decay and write of a persistent forward: the rows of the slots that the chunk writes.
#pragma once

#include "walk.cuh"

struct DecayWrite : Walk {
    __device__ __forceinline__ WriteTerm load_term(const WriteTerm* from) const {
        const uint4 word = ptx::load_readonly(reinterpret_cast<const uint4*>(from));
        WriteTerm term;
        memcpy(&term, &word, sizeof(term));
        return term;
    }
    // The slots of this warp's unit `unit`.
    __device__ __forceinline__ int first_of(int unit) const {
        const int team = threadIdx.x / 32 / ROW_WARPS;
        return ((unit * (WARPS / ROW_WARPS) + team) * blocks + rank) * UNIT;
    }
    // The records of a unit, one or more a lane; count is 0 where there is none.
    __device__ __forceinline__ void load_records(const Step& step, int unit, SlotRecord (&held)[HELD]) const {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int at = threadIdx.x % 32 + 32 * h, j = first_of(unit) + at;
            held[h] = SlotRecord{0, 0, 0, 0.0f};
            if (at < UNIT && j < step.slots) {
                const uint4 word = ptx::load_readonly(reinterpret_cast<const uint4*>(slots + step.n * capacity + j));
                memcpy(&held[h], &word, sizeof(held[h]));
            }
        }
    }
    __device__ __forceinline__ void load_terms(const Step& step, const SlotRecord (&held)[HELD],
                                               FirstTerm (&term)[HELD]) const {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            term[h] = FirstTerm{0.0f, 0};
            if (held[h].count > 0) {
                const WriteTerm found = load_term(write_terms + step.n * C * W + held[h].first);
                term[h] = FirstTerm{found.weight, found.token()};
            }
        }
    }
    // `now` and `next` are the records of the first two units. While a unit is written, the terms of the next and the
    // records of the one behind it are on their way.
    __device__ __forceinline__ void run(const Step& step, SlotRecord (&now)[HELD], SlotRecord (&next)[HELD]) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int word = threadIdx.x % WORDS, column = slice + word * VECTOR;
        const int row = WARP_ROWS > 1 ? lane / WORDS : 0;  // of those side by side in the warp
        SlotRecord* const staged = records + warp * UNIT;
        FirstTerm* const terms = first_terms + warp * UNIT;
        const WriteTerm* const chunk_terms = write_terms + step.n * C * W;
        BANK* const rows = memory + first_slot * row_stride + column;

        FirstTerm term[HELD];
        load_terms(step, now, term);
        for (int unit = 0; first_of(unit) < step.slots; ++unit) {
            const int first = first_of(unit);
            __syncwarp();
#pragma unroll
            for (int h = 0; h < HELD; ++h)
                if (lane + 32 * h < UNIT) staged[lane + 32 * h] = now[h];
            __syncwarp();
            BankWord words[WRITES];
#pragma unroll
            for (int w = 0; w < WRITES; ++w) {
                const SlotRecord& record = staged[w * WARP_ROWS + row];
                words[w] = BankWord{};
                if (record.count > 0 && column < D)
                    words[w] = ptx::load_global(reinterpret_cast<const BankWord*>(rows + record.slot * row_stride));
            }
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                if (lane + 32 * h < UNIT) terms[lane + 32 * h] = term[h];
                now[h] = next[h];
            }
            load_terms(step, now, term);
            load_records(step, unit + 2, next);
            __syncwarp();
#pragma unroll
            for (int w = 0; w < WRITES; ++w) {
                const int at = w * WARP_ROWS + row;
                const SlotRecord record = staged[at];
                if (record.count == 0 || column >= D) continue;
                float value[VECTOR], change[VECTOR];
                unpack<BANK, VECTOR>(words[w], value);
                keep_row(step, first + at, column, words[w], value);
                load_slice(delta + terms[at].token * COLUMNS, word, change);
#pragma unroll
                for (int c = 0; c < VECTOR; ++c) value[c] = fmaf(terms[at].weight, change[c], value[c] * record.cpe);
                add_terms(chunk_terms + record.first, record.count, word, value);
                store_values(rows + record.slot * row_stride, value);
            }
        }
    }
    __device__ __forceinline__ void keep_row(const Step& step, int j, int column, const BankWord& word,
                                             const float (&value)[VECTOR]) const {
        const long long at = (step.call * capacity + j) * D + column;
#if SNAPSHOT == 1
        ptx::store_global(reinterpret_cast<BankWord*>(static_cast<BANK*>(snapshot) + at), word);
#elif SNAPSHOT == 2
        store_values(static_cast<Bf16*>(snapshot) + at, value);
#endif
    }
    // Adds the terms behind the first.
    __device__ __forceinline__ void add_terms(const WriteTerm* from, int count, int word,
                                              float (&value)[VECTOR]) const {
        for (int e = 1; e < count; e += 4) {
            WriteTerm term[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) term[k] = load_term(from + min(e + k, count - 1));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (e + k >= count) break;
                float change[VECTOR];
                load_slice(delta + term[k].token() * COLUMNS, word, change);
#pragma unroll
                for (int c = 0; c < VECTOR; ++c) value[c] = fmaf(term[k].weight, change[c], value[c]);
            }
        }
    }
};
