// The rows that a step reads and does not write, backwards: their gradient rows and the dots of the read weights.
//
//     d_q_w[i, m] = <gr[i], M0[q_idx[i, m]]>          G0[s] += sum over Q entries e of s of q_w_e gr[token(e)]
//
// The bank holds M0, for the step has not written these rows; Phase A takes those that it has (phase_a.cu). A team of
// lanes takes slots in turn, a grid apart, and is the only writer of their gradient rows, which are rounded once. The
// rows of its next slot are on their way while the dots of the present one are added.
//
// So the launch before it, Phase A, touches none of these rows, and it has waited for all that came earlier before it
// lets this grid start. This grid works beside it and waits at its end alone, for the sake of those that wait for this
// grid. Streams of one bank may read the same rows, so each has a launch, and all but the first wait before they begin.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), LOADS (words of a lane in a
//         slice of a row), LANES (of a team: 32, or 16 where a row has at most 16 words).
// Grid    (blocks that share the slots, streams from first_stream on). Streams of one bank that read the same rows take a
//         launch each.
// Block   32 * WARPS threads.
// Reads   memory [P*S, D] (row_stride values apart); read_slots [chunks, capacity], read_slot_count [chunks], read_terms
//         [chunks, C R]; grad_readings [rows, D], lengths, cu_seqlens (chunk.cuh); capacity = min(C R, S).
// Writes  rows of gradient_bank [P*S, D]; d_q_w [chunks, C, R], of present entries of these slots alone.
// Sums    rows: entries in sorted order (token, then lane) onto the row. Dots: the tree of rows.cuh.
// Shared  none.
#include "chunk.cuh"
#include "entries.cuh"
#include "row_teams.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    gds(GRADIENT* gradient_bank, const BANK* memory, const ReadSlot* read_slots, const int* read_slot_count,
        const ReadTerm* read_terms, const BANK* grad_readings, const void* lengths, const void* cu_seqlens,
        float* d_q_w, long long row_stride, int step, int P, int T, int C, int R, int S, int D, int shared_bank,
        int wide, int first_stream) {
    const int lane = threadIdx.x % LANES, stride = gridDim.x * WARPS * TEAMS;
    int p = first_stream + blockIdx.y;  // renewed in each turn: no address of the chunk's arrays stays in registers
    const auto chunk = [&] { return static_cast<long long>(step) * P + p; };
    const auto term_at = [&](const ReadSlot& of, int e) { return read_terms[chunk() * C * R + of.first + e]; };
    const auto bank_row = [&](const ReadSlot& of) {
        return (shared_bank ? 0 : static_cast<long long>(p) * S) + of.slot;
    };

    // Lane x of a team holds the record and the first term of the team's slot x of LANES; `turns` has a bit for each x
    // that is a turn of a team of this warp.
    ReadSlot held;
    ReadTerm held_term;
    unsigned turns;
    int first = (blockIdx.x * WARPS * 32 + threadIdx.x) / LANES;
    const auto load_turns = [&] {
        const int at = first + lane * stride;
        held = ReadSlot{0, 0, 0, 0}, held_term = ReadTerm{0.0f, 0, 0, 0};
        if (at < read_slot_count[chunk()]) {
            held = read_slots[chunk() * min(static_cast<long long>(C) * R, static_cast<long long>(S)) + at];
            if (held.written) held.count = 0;
            if (held.count > 0) held_term = term_at(held, 0);
        }
        turns = __ballot_sync(~0u, held.count > 0);
        if (TEAMS == 2) turns = (turns | turns >> 16) & 0xffff;
    };
    // Goes to the next of the slots that have a turn, where there is one.
    const auto find_turn = [&] {
        while (turns == 0 && first / TEAMS * TEAMS + LANES * stride < read_slot_count[chunk()]) {
            first += LANES * stride;
            load_turns();
        }
        return turns == 0 ? 0 : __ffs(static_cast<int>(turns)) - 1;
    };
    const auto slot_of = [&](int turn) {
        const int count = turns == 0 ? 0 : of_lane(held.count, turn);
        return ReadSlot{of_lane(held.slot, turn), of_lane(held.first, turn), count, 0};
    };
    const auto term_of = [&](int turn) {
        return ReadTerm{of_lane(held_term.q_w, turn), of_lane(held_term.code, turn), 0, 0};
    };

    RowSlice<GRADIENT> after;
    RowSlice<BANK> before;
    Incoming incoming{grad_readings + chunk_of(step, p, T, C, lengths, cu_seqlens, wide).first_row * D};

    if (first_stream > 0) ptx::pdl_wait();
    ptx::pdl_trigger();
    int slice = 0;
    load_turns();
    int turn = find_turn();
    ReadSlot slot = slot_of(turn);
    ReadTerm term = term_of(turn);
    GRADIENT* gradient = gradient_bank + bank_row(slot) * D;
    if (slot.count > 0) {
        incoming.load(term, lane * WORD, D);
        after.load(gradient, lane * WORD, D);
        before.load(memory + bank_row(slot) * row_stride, lane * WORD, D);
    }

    while (most_of_teams(slot.count) > 0) {  // a slice of a slot of each team
        ptx::renew(p);
        const int column = slice + lane * WORD;
        const bool present = TEAMS == 1 || slot.count > 0;
        float value[LOADS][WORD], dot[LOADS] = {};
        const auto add_term = [&](int l, float weight) {
            float held_word[WORD], gr[WORD];
            before.word(l, held_word);
            incoming.row.word(l, gr);
#pragma unroll
            for (int c = 0; c < WORD; ++c) {
                dot[l] = fmaf(gr[c], held_word[c], dot[l]);
                value[l][c] = fmaf(weight, gr[c], value[l][c]);
            }
        };
        // Adds the dot of entry `e`, whose lane and token are `code`, where the team has one.
        const auto add_latest = [&](int e, int code) {
            float* const out = d_q_w + (chunk() * C + entry_token(code)) * R + entry_lane(code);
            add_dot(e < slot.count, out, dot, slice, D);
        };
        if (present) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                after.word(l, value[l]);
                add_term(l, term.q_w);
            }
        }
        const int most = most_of_teams(slot.count);
        int code = term.code;
        for (int e = 1; e < most; ++e) {
            ReadTerm now{};
            if (e < slot.count) {
                now = term_at(slot, e);
                incoming.load(now, column, D);
            }
            add_latest(e - 1, code);
            if (e >= slot.count) continue;
            renew_words(before);
            code = now.code;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                dot[l] = 0.0f;
                add_term(l, now.q_w);
            }
        }
        if (present) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l) store_word(gradient, column + l * 32 * WORD, D, value[l]);
        }

        // The next turn's rows are asked for before this turn's last dot is added.
        ptx::renew(p);
        const bool last = slice + SLICE >= D;
        const int coming_slice = last ? 0 : slice + SLICE;
        if (last) {
            turns &= turns - 1;
            turn = find_turn();
        }
        const ReadSlot coming = slot_of(turn);
        term = term_of(turn);
        after = {}, before = {}, incoming.row = {};
        if (coming.count > 0) {
            const int coming_column = coming_slice + lane * WORD;
            gradient = gradient_bank + bank_row(coming) * D;
            after.load(gradient, coming_column, D);
            before.load(memory + bank_row(coming) * row_stride, coming_column, D);
            incoming.load(term, coming_column, D);
        }
        add_latest(most - 1, code);
        slot = coming, slice = coming_slice;
    }
    ptx::pdl_wait();
}
