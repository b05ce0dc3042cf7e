// Phase A and GDS of a persistent backward: the rows of the slots that the chunk writes, and of those that it only
// reads. A team takes SLOTS slots at a time, whose loads are all on their way before the first is used.
#pragma once

#include "walk_back.cuh"

// Moves what is held of the next slots up by one: a loop over slots then has its code once, and registers for all.
template <class T>
static __device__ __forceinline__ void take_next(T (&held)[SLOTS]) {
#pragma unroll
    for (int w = 0; w + 1 < SLOTS; ++w) held[w] = held[w + 1];
}

struct Rows : BackWalk {
    // The slots of this warp's unit `unit`.
    __device__ __forceinline__ int first_of(int unit) const {
        return ((unit * WARPS + warp()) * blocks + rank) * UNIT;
    }
    template <class T>
    static __device__ __forceinline__ T load_record(const T* from) {
        static_assert(sizeof(T) == sizeof(uint4));
        const uint4 word = ptx::load_readonly(reinterpret_cast<const uint4*>(from));
        T record;
        memcpy(&record, &word, sizeof(record));
        return record;
    }
    // The most entries of a slot that a team of this warp has under way beside this one.
    template <class T>
    static __device__ __forceinline__ int most_of(const T* row_of_slots) {
        int most = 0;
#pragma unroll
        for (int other = 0; other < TEAMS; ++other) most = max(most, row_of_slots[other].count);
        return most;
    }
    // Adds the dot of one entry a team; `present`: this team has one.
    __device__ __forceinline__ void store_dot(bool present, float share, float* to) const {
        float shares[1] = {share};
        const float dot = add_lanes(shares);
        if (present && word() == 0) *to = dot;
    }
    // Entry lane / UNIT of slot lane % UNIT, where the slot has it: `held` are the slots, whose entries are `terms`.
    template <class Term, class Slot>
    __device__ __forceinline__ FirstTerm load_ahead(const Slot* held, const Term* terms) const {
        const int entry = lane() / UNIT, at = lane() % UNIT;
        if (entry >= AHEAD || entry >= held[at].count) return FirstTerm{};
        return first_term(load_record(terms + held[at].first + entry));
    }
    static __device__ __forceinline__ FirstTerm first_term(const WriteTerm& term) {
        return FirstTerm{term.k_eff, term.code};
    }
    static __device__ __forceinline__ FirstTerm first_term(const ReadTerm& term) {
        return FirstTerm{term.q_w, term.code};
    }
    // Adds the Q entries from `e` on of one slot a team to its gradient row; `ahead` are the first ones.
    __device__ __forceinline__ void add_queries(const Step& step, const ReadTerm* from, int e, int count, int most,
                                                const FirstTerm* ahead, const float (&held)[WORD],
                                                float (&value)[WORD]) const {
        for (; e < most; ++e) {
            const bool present = e < count;
            FirstTerm term{};
            if (present) term = e < AHEAD ? ahead[e * UNIT] : first_term(load_record(from + e));
            float share = 0.0f;
            if (present) {
                float gr[WORD];
                load_readings(entry_token(term.code), gr);
#pragma unroll
                for (int c = 0; c < WORD; ++c) {
                    share = fmaf(gr[c], held[c], share);
                    value[c] = fmaf(term.weight, gr[c], value[c]);
                }
            }
            store_dot(present, share, query_dot(step, term));
        }
    }
    __device__ __forceinline__ float* query_dot(const Step& step, const FirstTerm& term) const {
        return partial_q_w + (static_cast<long long>(step.partial) * C + entry_token(term.code)) * R +
            entry_lane(term.code);
    }
    __device__ __forceinline__ float* write_dot(const Step& step, int code) const {
        return partial_k_eff + (static_cast<long long>(step.partial) * C + entry_token(code)) * W + entry_lane(code);
    }
};

// The slots that the chunk writes: Phase A, and GDS of those that it reads too.
struct WrittenRows : Rows {
    // The record of a slot of a unit, one a lane; count is 0 where there is none.
    struct Held {
        SlotRecord record;
        Queries queries;
    };

    __device__ __forceinline__ Held load_held(const Step& step, int unit) const {
        Held held{};
        const int at = lane(), j = first_of(unit) + at;
        if (at < UNIT && j < step.slots) {
            held.record = load_record(slots + step.call * capacity + j);
            const uint2 word =
                ptx::load_readonly(reinterpret_cast<const uint2*>(slot_reads + step.call * capacity + j));
            held.queries = Queries{static_cast<int>(word.x), static_cast<int>(word.y)};
        }
        return held;
    }
    // `held` are the records of the first unit.
    __device__ __forceinline__ void run(const Step& step, Held held) const {
        const int lane = this->lane();
        const WriteTerm* const chunk_terms = write_terms + step.call * C * W;
        const ReadTerm* const chunk_queries = read_terms + step.call * C * R;
        for (int unit = 0; first_of(unit) < step.slots; ++unit) {
            __syncwarp();
            if (lane < UNIT) {
                records()[lane] = held.record;
                queries()[lane] = held.queries;
            }
            __syncwarp();
            RowSlice<GRADIENT> after[SLOTS];
            KeptSlice before[SLOTS];
#pragma unroll
            for (int w = 0; w < SLOTS; ++w) {
                const int at = w * TEAMS + team();
                const SlotRecord& record = records()[at];
                if (record.count == 0) continue;
                after[w].load(gradient_bank + (first_slot + record.slot) * D, column(), D);
                before[w].load(snapshot, snapshot_scale, step.call * capacity + first_of(unit) + at, column(), D);
            }
            const FirstTerm term = load_ahead(records(), chunk_terms);
            const FirstTerm query_term = load_ahead(queries(), chunk_queries);
            held = load_held(step, unit + 1);
            if (lane < AHEAD * UNIT) {
                terms()[lane] = term;
                query_terms()[lane] = query_term;
            }
            __syncwarp();
#pragma unroll 1
            for (int w = 0; w < SLOTS; ++w) {
                float share[2];
                finish_slot(step, w, after[0], before[0], share[0], share[1]);
                take_next(after);
                take_next(before);
                const float dot = add_lanes(share);
                const int at = w * TEAMS + team();
                if (sums_first<2>() && records()[at].count > 0) {
                    if (summed<2>() == 0)
                        partial_tot[static_cast<long long>(step.partial) * capacity + first_of(unit) + at] = dot;
                    else
                        *write_dot(step, terms()[at].code) = dot;
                }
            }
        }
    }
    // Brings slot `w` of each team to the chunk's start; returns the lane's shares of d_tot and of the first d_k_eff.
    __device__ __forceinline__ void finish_slot(const Step& step, int w, const RowSlice<GRADIENT>& after,
                                                const KeptSlice& before, float& of_total, float& of_first) const {
        const int at = w * TEAMS + team();
        const SlotRecord record = records()[at];
        of_total = of_first = 0.0f;
        float value[WORD], restored[WORD];
        if (record.count > 0) {
            const FirstTerm term = terms()[at];
            after.word(0, value);
            before.word(0, restored);
#pragma unroll
            for (int c = 0; c < WORD; ++c) {
                of_total = fmaf(value[c], restored[c], of_total);
                value[c] *= record.cpe;
            }
            before.restore(memory + (first_slot + record.slot) * row_stride, column(), D);
            of_first = add_entry(term.code, term.weight, restored, value);
        }
        const int most = most_of(records() + w * TEAMS);
        const WriteTerm* const slot_terms = write_terms + step.call * C * W + record.first;
        for (int e = 1; e < most; ++e) {
            const bool present = e < record.count;
            int code = 0;
            float share = 0.0f;
            if (present) {
                const FirstTerm term = e < AHEAD ? terms()[e * UNIT + at] : first_term(load_record(slot_terms + e));
                code = term.code;
                share = add_entry(code, term.weight, restored, value);
            }
            store_dot(present, share, write_dot(step, code));
        }
        const int most_queries = most_of(queries() + w * TEAMS);
        if (most_queries > 0) {
            // As the rows are stored: K entries are added before they are rounded, Q entries afterwards (phase_a.cu).
            if (record.count > 0) {
#pragma unroll
                for (int c = 0; c < WORD; ++c) {
                    value[c] = round_to<GRADIENT>(value[c]);
                    restored[c] = round_to<BANK>(restored[c]);
                }
            }
            const Queries of_slot = queries()[at];
            add_queries(step, read_terms + step.call * C * R + of_slot.first, 0, of_slot.count, most_queries,
                        query_terms() + at, restored, value);
        }
        if (record.count > 0) store_word(gradient_bank + (first_slot + record.slot) * D, column(), D, value);
    }
    // Adds a K entry to its slot's gradient row; returns the lane's share of its dot.
    __device__ __forceinline__ float add_entry(int code, float k_eff, const float (&restored)[WORD],
                                               float (&value)[WORD]) const {
        const float beta = -weight()[entry_token(code)], factor = beta * k_eff;
        float change[WORD], share = 0.0f;
        load_slice(adjoint() + entry_token(code) * COLUMNS, word(), change);
#pragma unroll
        for (int c = 0; c < WORD; ++c) {
            share = fmaf(change[c], beta * restored[c], share);
            value[c] = fmaf(factor, change[c], value[c]);
        }
        return share;
    }
};

// The slots that the chunk reads and does not write: GDS.
struct ReadRows : Rows {
    // Where this warp is: its next unit and the records of it, one a lane.
    struct Cursor {
        int unit;
        ReadSlot held;
    };

    __device__ __forceinline__ ReadSlot load_held(const Step& step, int unit) const {
        ReadSlot held{};
        const int at = lane(), j = first_of(unit) + at;
        if (at < UNIT && j < step.read_slots) {
            held = load_record(read_slots + step.call * read_capacity + j);
            if (held.written) held.count = 0;
        }
        return held;
    }
    __device__ __forceinline__ Cursor start(const Step& step) const {
        return Cursor{0, load_held(step, 0)};
    }
    // Takes up to `units` units.
    __device__ __forceinline__ void run(const Step& step, Cursor& cursor, int units) const {
        const int lane = this->lane();
        ReadSlot* const unit_records = read_records();
        const ReadTerm* const chunk_terms = read_terms + step.call * C * R;
        for (int done = 0; done < units && first_of(cursor.unit) < step.read_slots; ++done) {
            __syncwarp();
            if (lane < UNIT) unit_records[lane] = cursor.held;
            __syncwarp();
            RowSlice<GRADIENT> after[SLOTS];
            RowSlice<BANK> before[SLOTS];
#pragma unroll
            for (int w = 0; w < SLOTS; ++w) {
                const ReadSlot& record = unit_records[w * TEAMS + team()];
                if (record.count == 0) continue;
                after[w].load(gradient_bank + (first_slot + record.slot) * D, column(), D);
                before[w].load(memory + (first_slot + record.slot) * row_stride, column(), D);
            }
            const FirstTerm term = load_ahead(unit_records, chunk_terms);
            cursor.held = load_held(step, ++cursor.unit);
            if (lane < AHEAD * UNIT) query_terms()[lane] = term;
            __syncwarp();
            float share[SLOTS] = {};
#pragma unroll 1
            for (int w = 0; w < SLOTS; ++w) {
                const int at = w * TEAMS + team();
                const ReadSlot record = unit_records[at];
                const FirstTerm first = query_terms()[at];
                float value[WORD], held[WORD];
                float own_share = 0.0f;
                if (record.count > 0) {
                    float gr[WORD];
                    after[0].word(0, value);
                    before[0].word(0, held);
                    load_readings(entry_token(first.code), gr);
#pragma unroll
                    for (int c = 0; c < WORD; ++c) {
                        own_share = fmaf(gr[c], held[c], own_share);
                        value[c] = fmaf(first.weight, gr[c], value[c]);
                    }
                }
                add_queries(step, chunk_terms + record.first, 1, record.count, most_of(unit_records + w * TEAMS),
                            query_terms() + at, held, value);
                if (record.count > 0) store_word(gradient_bank + (first_slot + record.slot) * D, column(), D, value);
                take_next(after);
                take_next(before);
                take_next(share);
                share[SLOTS - 1] = own_share;
            }
            const float dot = add_lanes(share);
            const int at = summed<SLOTS>() * TEAMS + team();
            if (sums_first<SLOTS>() && unit_records[at].count > 0) *query_dot(step, query_terms()[at]) = dot;
        }
    }
};
