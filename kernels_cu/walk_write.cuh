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
    // The first slot of this warp's unit `unit`.
    __device__ __forceinline__ int first_of(int unit) const {
        const int team = threadIdx.x / 32 / ROW_WARPS;
        return ((unit * (WARPS / ROW_WARPS) + team) * blocks + rank) * UNIT;
    }
    __device__ __forceinline__ int column() const {
        return slice + threadIdx.x % WORDS * VECTOR;
    }
    // Of the slots side by side in the warp, this thread's.
    __device__ __forceinline__ int row() const {
        return WARP_ROWS > 1 ? threadIdx.x % 32 / WORDS : 0;
    }
    // The record of a unit's slot a lane; its count is 0 where there is none.
    __device__ __forceinline__ SlotRecord load_record(const Step& step, int unit) const {
        static_assert(UNIT <= 32);
        const int at = threadIdx.x % 32, j = first_of(unit) + at;
        SlotRecord record{0, 0, 0, 0.0f};
        if (at < UNIT && j < step.slots) {
            const uint4 word = ptx::load_readonly(reinterpret_cast<const uint4*>(slots + step.n * capacity + j));
            memcpy(&record, &word, sizeof(record));
        }
        return record;
    }
    // Asks for the rows and first terms of a unit, whose records the lanes hold.
    __device__ __forceinline__ void ask_unit(const Step& step, int batch, const SlotRecord& record) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = (warp * RING + batch) * UNIT;
        if (lane < UNIT) {
            records[place + lane] = record;
            if (record.count > 0) {
                const WriteTerm* const from = write_terms + step.n * C * W + record.first;
                FirstTerm* const to = first_terms + place * AHEAD + lane;
                ptx::copy_async_4(&to->weight, &from->weight);
                ptx::copy_async_4(&to->code, &from->code);
                if (record.count > 1) {
                    ptx::copy_async_4(&to[UNIT].weight, &from[1].weight);
                    ptx::copy_async_4(&to[UNIT].code, &from[1].code);
                }
            }
        }
        __syncwarp();
        const Rows rows = rows_at(column());
        int slot[BATCH];
#pragma unroll
        for (int w = 0; w < BATCH; ++w) {
            const SlotRecord& of_row = records[place + w * WARP_ROWS + row()];
            slot[w] = of_row.count > 0 && column() < D ? of_row.slot : -1;
        }
#pragma unroll
        for (int w = 0; w < BATCH; ++w)
            if (slot[w] >= 0) ask_row(arrival(batch, w), rows.row(slot[w]));
    }
    // The records of the first units.
    __device__ __forceinline__ void load_records(const Step& step, SlotRecord (&first)[RING]) const {
#pragma unroll
        for (int unit = 0; unit < RING; ++unit) first[unit] = load_record(step, unit);
    }
    // Asks for the first units, as one group of copies.
    __device__ __forceinline__ void ask_first(const Step& step, const SlotRecord (&first)[RING]) const {
#pragma unroll
        for (int unit = 0; unit < RING; ++unit) ask_unit(step, unit, first[unit]);
        ptx::copy_commit();
    }
    // The first units are on their way, with at most one group of copies behind them. `next` are the records of the
    // units behind these.
    __device__ __forceinline__ void run(const Step& step, SlotRecord (&next)[2]) const {
        ptx::copy_wait<1>();
        for (int unit = 0, batch = 0; first_of(unit) < step.slots; ++unit) {
            ptx::copy_wait<RING - 1>();
            __syncwarp();
            write_unit(step, unit, batch);
            __syncwarp();
            ask_unit(step, batch, next[0]);
            ptx::copy_commit();
            next[0] = next[1];
            next[1] = load_record(step, unit + RING + 2);
            batch = batch + 1 < RING ? batch + 1 : 0;
        }
    }
    __device__ __forceinline__ void write_unit(const Step& step, int unit, int batch) const {
        const int place = (threadIdx.x / 32 * RING + batch) * UNIT, word = threadIdx.x % WORDS;
        const WriteTerm* const chunk_terms = write_terms + step.n * C * W;
        const Rows rows = rows_at(column());
#pragma unroll
        for (int w = 0; w < BATCH; ++w) {
            const int at = w * WARP_ROWS + row();
            const SlotRecord record = records[place + at];
            if (record.count == 0 || column() >= D) continue;
            const FirstTerm term = first_terms[place * AHEAD + at];
            const BankWord held = *arrival(batch, w);
            float value[VECTOR], change[VECTOR];
            unpack_pairs<BANK, VECTOR>(held, value);
            keep_row(step, first_of(unit) + at, column(), held, value);
            load_slice(delta + entry_token(term.code) * COLUMNS, word, change);
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) value[c] = fmaf(term.weight, change[c], value[c] * record.cpe);
            add_terms(chunk_terms + record.first, record.count, first_terms + place * AHEAD + at, word, value);
            store_values(rows.row(record.slot), value);
        }
    }
    __device__ __forceinline__ void keep_row(const Step& step, int j, int column, const BankWord& word,
                                             const float (&value)[VECTOR]) const {
        const long long at = ((step.call - first_kept) * capacity + j) * D + column;
        // Nobody reads it soon: the rows that are written next stay in L2.
#if SNAPSHOT == 1
        ptx::store_global(reinterpret_cast<BankWord*>(static_cast<BANK*>(snapshot) + at), word, ptx::evict_first());
#elif SNAPSHOT == 2
        ptx::store_global(reinterpret_cast<Word<Bf16, VECTOR>*>(static_cast<Bf16*>(snapshot) + at),
                          pack<Bf16, VECTOR>(value), ptx::evict_first());
#endif
    }
    // Adds the terms behind the first; `ahead` are the first ones, UNIT apart.
    __device__ __forceinline__ void add_terms(const WriteTerm* from, int count, const FirstTerm* ahead, int word,
                                              float (&value)[VECTOR]) const {
        const auto add = [&](int code, float weight) {
            float change[VECTOR];
            load_slice(delta + entry_token(code) * COLUMNS, word, change);
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) value[c] = fmaf(weight, change[c], value[c]);
        };
        for (int e = 1; e < count;) {
            if (e < AHEAD) {
                const FirstTerm term = ahead[e * UNIT];
                add(term.code, term.weight);
                ++e;
                continue;
            }
            WriteTerm term[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) term[k] = load_term(from + min(e + k, count - 1));
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (e + k < count) add(term[k].code, term[k].weight);
            e += 4;
        }
    }
};
