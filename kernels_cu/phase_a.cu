// The written rows of a step, backwards: their gradient rows, their dots, and the bank's rows as they were.
//
//     d_tot(s) = cpe(s) <G1[s], M0[s]>          d_k_eff[i, n] = <-beta_i lam_i, M0[k_idx[i, n]]>
//     G0[s] = cpe(s) G1[s] + sum over K entries e of s of k_eff_e (-beta lam)[token(e)]          M[s] = M0[s]
//
// and of the slots that the chunk reads too what gds.cu does for the others:
//
//     d_q_w[i, m] = <gr[i], M0[q_idx[i, m]]>          G0[s] += sum over Q entries e of s of q_w_e gr[token(e)]
//
// M0 is the snapshot. A team of lanes takes slots in turn, a grid apart, and is the only writer of their rows; gradient
// rows are rounded after their K entries and after their Q entries. The rows of its next slot are on their way while the
// dots of the present one are added.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), LOADS (words of a lane in a
//         slice of a row), LANES (of a team: 32, or 16 where a row has at most 16 words), SNAPSHOT (1 in the bank's
//         format, 2 Bf16, 3 fp8, 4 int4).
// Grid    (blocks that share the slots, P streams).
// Block   32 * WARPS threads.
// Reads   snapshot, snapshot_scale (decay_write.cu, keep_rows.cu); slots [chunks, capacity], slot_count [chunks],
//         write_terms [chunks, C W]; lam [chunks, C, D], strength [chunks, C]; capacity = min(C W, S). slot_reads
//         [chunks, capacity], read_terms [chunks, C R]; grad_readings [rows, D], lengths, cu_seqlens (chunk.cuh).
// Writes  rows of gradient_bank [P*S, D] and of memory [P*S, D] (row_stride values apart); d_k_eff [chunks, C, W] and
//         d_q_w [chunks, C, R], of present entries of these slots alone; d_tot [chunks, capacity].
// Sums    rows: terms in sorted order (token, then lane) onto the decayed row; then, onto the rounded row, Q entries in
//         the same order. Dots: the tree of rows.cuh.
// Shared  none.
#include "chunk.cuh"
#include "entries.cuh"
#include "row_teams.cuh"

#define WARPS 8
// The row of gr of a turn's first Q entry comes a turn ahead where registers suffice.
constexpr bool AHEAD = LOADS == 1 && VECTOR > 1;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    phase_a(GRADIENT* gradient_bank, BANK* memory, const void* snapshot, const float* snapshot_scale,
            const SlotRecord* slots, const int* slot_count, const WriteTerm* write_terms, const float* lam,
            const float* strength, const int2* slot_reads, const ReadTerm* read_terms, const BANK* grad_readings,
            const void* lengths, const void* cu_seqlens, float* d_k_eff, float* d_q_w, float* d_tot,
            long long row_stride, int step, int P, int T, int C, int W, int R, int S, int D, int shared_bank,
            int wide) {
    const int lane = threadIdx.x % LANES, stride = gridDim.x * WARPS * TEAMS;
    int p = blockIdx.y;  // renewed in each turn: no address of the chunk's arrays stays in registers
    const auto chunk = [&] { return static_cast<long long>(step) * P + p; };
    const auto kept_row = [&](int at) {
        return chunk() * min(static_cast<long long>(C) * W, static_cast<long long>(S)) + at;
    };
    const auto term_at = [&](const SlotRecord& of, int e) { return write_terms[chunk() * C * W + of.first + e]; };
    const auto query_at = [&](int e) { return read_terms[chunk() * C * R + e]; };
    const auto bank_row = [&](const SlotRecord& of) {
        return (shared_bank ? 0 : static_cast<long long>(p) * S) + of.slot;
    };
    const auto beta_of = [&](const WriteTerm& of) { return -strength[chunk() * C + of.token()]; };

    // Lane x of a team holds the record, the first term and its -beta of the team's turn x; where its Q entries begin and
    // how many they are; if AHEAD, the first of them.
    SlotRecord held;
    WriteTerm held_term;
    float held_beta;
    int2 held_reads;
    ReadTerm held_query;
    const auto load_turns = [&](int first) {
        const int at = first + lane * stride;
        held = SlotRecord{0, 0, 0, 0.0f}, held_term = WriteTerm{0.0f, 0.0f, 0, 0}, held_beta = 0.0f;
        held_reads = make_int2(0, 0), held_query = ReadTerm{0.0f, 0, 0, 0};
        if (at < slot_count[chunk()]) {
            held = slots[kept_row(at)];
            held_reads = slot_reads[kept_row(at)];
            if (AHEAD && held_reads.y > 0) held_query = query_at(held_reads.x);
            held_term = term_at(held, 0);
            held_beta = beta_of(held_term);
        }
    };
    const auto slot_of = [&](int turn) {
        return SlotRecord{of_lane(held.slot, turn), of_lane(held.first, turn), of_lane(held.count, turn),
                          of_lane(held.cpe, turn)};
    };
    const auto term_of = [&](int turn) {
        return WriteTerm{0.0f, of_lane(held_term.k_eff, turn), of_lane(held_term.code, turn), 0};
    };

    RowSlice<GRADIENT> after;
    KeptSlice before;
    RowSlice<float> adjoint;
    Incoming incoming{grad_readings + chunk_of(step, p, T, C, lengths, cu_seqlens, wide).first_row * D};
    const auto load_kept = [&](int at, int column) { before.load(snapshot, snapshot_scale, kept_row(at), column, D); };
    const auto load_adjoint = [&](const WriteTerm& of, int column) {
        adjoint.load_shared_row(lam + (chunk() * C + of.token()) * D, column, D);
    };
    const auto query_of = [&](int turn) {
        return ReadTerm{of_lane(held_query.q_w, turn), of_lane(held_query.code, turn), 0, 0};
    };
    const auto load_first_incoming = [&](int turn, int column) {
        const ReadTerm query = query_of(turn);
        const int reads = of_lane(held_reads.y, turn);
        incoming.row = {};
        if (reads > 0) incoming.load(query, column, D);
    };

    // Records, terms, strength and snapshot are the forward's, and the launch before this one writes no gradient row: they
    // may be read before the wait.
    int j = (blockIdx.x * WARPS * 32 + threadIdx.x) / LANES, turn = 0, slice = 0;
    if (j < slot_count[chunk()]) load_kept(j, lane * WORD);
    load_turns(j);
    SlotRecord slot = slot_of(0);
    WriteTerm term = term_of(0);
    float beta = of_lane(held_beta, 0);
    GRADIENT* gradient = gradient_bank + bank_row(slot) * D;
    BANK* bank = memory + bank_row(slot) * row_stride;
    if (slot.count > 0) after.load(gradient, lane * WORD, D);
    if constexpr (AHEAD) load_first_incoming(0, lane * WORD);
    ptx::pdl_wait();
    ptx::pdl_trigger();
    if (slot.count > 0) load_adjoint(term, lane * WORD);

    float total = 0.0f;
    while (most_of_teams(slot.count) > 0) {  // a slice of a slot of each team
        ptx::renew(p);
        const int column = slice + lane * WORD;
        const bool present = TEAMS == 1 || slot.count > 0;
        float value[LOADS][WORD], product[LOADS] = {}, dot[LOADS] = {};
        const auto add_term = [&](int l, const float (&restored)[WORD], float weight) {
            float change[WORD];
            adjoint.word(l, change);
#pragma unroll
            for (int c = 0; c < WORD; ++c) {
                dot[l] = fmaf(change[c], beta * restored[c], dot[l]);
                value[l][c] = fmaf(weight, change[c], value[l][c]);
            }
        };
        // The dot of the latest entry: of its lane and token `code`, where the team has one.
        int code = term.code;
        bool given = present, of_query = false;
        const auto add_latest = [&] {
            const long long row = chunk() * C + entry_token(code);
            float* const out = of_query ? d_q_w + row * R : d_k_eff + row * W;
            add_dot(given, out + entry_lane(code), dot, slice, D);
        };
        if (present) {
            const float weight = beta * term.k_eff;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                float restored[WORD];
                before.word(l, restored);
                after.word(l, value[l]);
#pragma unroll
                for (int c = 0; c < WORD; ++c) {
                    product[l] = fmaf(value[l][c], restored[c], product[l]);
                    value[l][c] *= slot.cpe;
                }
                add_term(l, restored, weight);
            }
            before.restore(bank, column, D);
        }
        const int most = most_of_teams(slot.count);
        for (int e = 1; e < most; ++e) {
            add_latest();
            given = e < slot.count;
            if (!given) continue;
            if constexpr (SNAPSHOT <= 2) renew_words(before);
            const WriteTerm now = term_at(slot, e);
            load_adjoint(now, column);
            beta = beta_of(now);
            code = now.code;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                float restored[WORD];
                before.word(l, restored);
                dot[l] = 0.0f;
                add_term(l, restored, beta * now.k_eff);
            }
        }
        const int reads = of_lane(held_reads.y, turn), most_reads = most_of_teams(reads);
        if (most_reads > 0) {
            const int first_read = of_lane(held_reads.x, turn);
            ReadTerm now{};
            if constexpr (AHEAD) now = query_of(turn);
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
#pragma unroll
                for (int c = 0; c < WORD; ++c) value[l][c] = round_to<GRADIENT>(value[l][c]);
            for (int e = 0; e < most_reads; ++e) {
                const bool asks = e < reads && (e > 0 || !AHEAD);
                if (asks) now = query_at(first_read + e);
                if (asks && LOADS < 4) incoming.load(now, column, D);
                add_latest();
                given = e < reads, of_query = true;
                if (!given) continue;
                if (asks && LOADS == 4) incoming.load(now, column, D);  // not earlier, for want of registers
                if constexpr (SNAPSHOT <= 2) renew_words(before);
                code = now.code;
#pragma unroll
                for (int l = 0; l < LOADS; ++l) {
                    float restored[WORD], gr[WORD];
                    before.word(l, restored);
                    incoming.row.word(l, gr);
                    dot[l] = 0.0f;
#pragma unroll
                    for (int c = 0; c < WORD; ++c) {
                        dot[l] = fmaf(gr[c], round_to<BANK>(restored[c]), dot[l]);
                        value[l][c] = fmaf(now.q_w, gr[c], value[l][c]);
                    }
                }
            }
        }
        if (present) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l) store_word(gradient, column + l * 32 * WORD, D, value[l]);
        }

        // The next turn's rows are asked for before this turn's last dots are added.
        ptx::renew(p);
        const bool last = slice + SLICE >= D;
        const int coming_j = last ? j + stride : j, coming_slice = last ? 0 : slice + SLICE;
        if (last && ++turn == LANES) {
            turn = 0;
            load_turns(coming_j);
        }
        const SlotRecord coming = slot_of(turn);
        term = term_of(turn), beta = of_lane(held_beta, turn);
        after = {}, before = {}, adjoint = {};
        if (coming.count > 0) {
            gradient = gradient_bank + bank_row(coming) * D, bank = memory + bank_row(coming) * row_stride;
            after.load(gradient, coming_slice + lane * WORD, D);
            load_kept(coming_j, coming_slice + lane * WORD);
            load_adjoint(term, coming_slice + lane * WORD);
        }
        if constexpr (AHEAD) load_first_incoming(turn, coming_slice + lane * WORD);
        add_latest();
        total = add_team(total, product, slice, D);
        if (last && present && lane == 0) d_tot[kept_row(j)] = slot.cpe == 0.0f ? 0.0f : slot.cpe * total;
        slot = coming, j = coming_j, slice = coming_slice;
    }
}
