// All steps of a slab backwards in one launch. Columns are independent but for the dots over them, so a cluster walks
// the steps of one column slice of one stream by itself, last step first, with cluster barriers where the stepwise
// schedule ends a kernel. Every sum has the order of gwr, du_update, phase_a and gds, so the bits are theirs.
//
//     gwr[i] = sum_n k_val exp(rex) G1[k_idx[i, n]]                                              GWR
//     lam = QX^T gr + X^T gwr      grad_v = strength lam                                         d_u update
//     G0[s] = cpe(s) G1[s] + sum over K entries of k_eff (-beta lam)[token]      M[s] = M0[s]    Phase A
//     G0[s] += sum over Q entries of q_w gr[token]                                               GDS
//
// The blocks of a cluster own pairs of tokens in turn: they sum the rows of these tokens and compute their rows of lam.
// Every block holds gr, gwr and lam of all tokens. Slots go to the warps of the cluster in turn; those that are read and
// not written touch rows that nothing else of the step touches, and fill the waits at the barriers.
//
// Macros  BANK (float, Bf16, Fp16), GRADIENT (BANK or float), VECTOR (columns of one load), COLUMNS (of a slice: 256 or
//         128 bytes of BANK), SNAPSHOT (1 in the bank's format, 2 Bf16, 3 fp8, 4 int4), THREADS (of a block).
// Grid    (blocks of a cluster * slices, P streams). Cluster: 1 to 8 blocks of one slice. Block: THREADS.
// Reads   gradient_bank [P*S, D], memory [P*S, D] (rows row_stride values apart); snapshot, snapshot_scale
//         (decay_write.cu, keep_rows.cu); k_idx [rows, W] (64-bit where wide_index); write_weight [chunks, C, W], err
//         [chunks, C, D], strength [chunks, C], x, qx [chunks, C, C]; grad_readings [rows, D] (aligned to 16 bytes);
//         slots, slot_reads [chunks, capacity], slot_count [chunks], write_terms [chunks, C W]; read_slots [chunks,
//         read capacity], read_slot_count [chunks], read_terms [chunks, C R]; lengths, cu_seqlens (chunk.cuh);
//         capacity = min(C W, S), read capacity = min(C R, S).
// Writes  rows of gradient_bank and of memory; lam [chunks, C, D], grad_v [rows, D] (0 on padding); dots over a slice's
//         columns, for column_sum.cu: partial_k_pd, partial_k_eff [slices, slab_chunks, C, W], partial_q_w [slices,
//         slab_chunks, C, R], of present entries alone but for k_pd, partial_tot [slices, slab_chunks, capacity].
// Sums    rows of a token: groups of every 16th, in turn, then the groups in order; lam[j]: over i upwards from j, of
//         each i first the term of qx; terms of a slot in sorted order; dots: the tree of rows.cuh up to a slice.
// Shared  dynamic, in order: records and terms of the slots under way, two stages of tiles of X and QX (or, where
//         overlap, the lists, whichever are larger), strength [C], gr [C, COLUMNS] in the bank's format, list_tokens
//         lists of W entries, gwr [C, COLUMNS], lam [C, COLUMNS] (where in_place, in gwr's place).
//         plan/persistent_backward.py adds them up.
#include "walk_back_gwr.cuh"
#include "walk_back_rows.cuh"
#include "walk_back_update.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent_backward(GRADIENT* gradient_bank, BANK* memory, const void* snapshot, const float* snapshot_scale,
                        const void* k_idx, const float* write_weight, const float* err, const float* strength,
                        const float* x, const float* qx, const BANK* grad_readings, const SlotRecord* slots,
                        const int* slot_count, const WriteTerm* write_terms, const Queries* slot_reads,
                        const ReadSlot* read_slots, const int* read_slot_count, const ReadTerm* read_terms,
                        const void* lengths, const void* cu_seqlens, float* lam, BANK* grad_v, float* partial_k_pd,
                        float* partial_k_eff, float* partial_q_w, float* partial_tot, long long row_stride,
                        int slab_step, int slab_chunks, int P, int T, int C, int W, int R, int S, int D,
                        int shared_bank, int wide, int wide_index, int list_tokens, int in_place, int overlap) {
    const int p = blockIdx.y, rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
    const int all_pairs = (C + 1) / 2, most_pairs = (all_pairs + blocks - 1) / blocks;
    const int pairs = min(min(MAX_PAIRS, THREADS / GROUPS), most_pairs);
    const int slice = blockIdx.x / blocks;

    BackWalk walk;
    walk.gradient_bank = gradient_bank, walk.memory = memory, walk.snapshot = snapshot,
    walk.snapshot_scale = snapshot_scale, walk.k_idx = k_idx, walk.write_weight = write_weight, walk.err = err,
    walk.strength = strength, walk.x = x, walk.qx = qx, walk.grad_readings = grad_readings;
    walk.slots = slots, walk.write_terms = write_terms, walk.slot_reads = slot_reads, walk.read_slots = read_slots,
    walk.read_terms = read_terms;
    walk.lam = lam, walk.grad_v = grad_v;
    walk.partial_k_pd = partial_k_pd, walk.partial_k_eff = partial_k_eff, walk.partial_q_w = partial_q_w,
    walk.partial_tot = partial_tot;
    walk.row_stride = row_stride;
    walk.first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
    walk.capacity = min(C * W, S), walk.read_capacity = min(C * R, S);
    walk.C = C, walk.W = W, walk.R = R, walk.S = S, walk.D = D, walk.list_tokens = list_tokens;
    walk.wide_index = wide_index != 0, walk.in_place = in_place != 0;
    walk.thread = threadIdx.x, walk.slice = slice * COLUMNS, walk.rank = rank, walk.blocks = blocks;
    walk.own = 2 * ((all_pairs - rank + blocks - 1) / blocks);
    walk.pairs = pairs, walk.passes = (most_pairs + pairs - 1) / pairs;
    const int lists = list_tokens * W * (wide_index ? 3 : 2) + 3 & ~3, tiles = 2 * TILE * pairs * 4;
    walk.weight_at = TILES_AT + (overlap ? max(lists, tiles) : tiles);
    const int behind = walk.weight_at + walk.weight_floats() + walk.readings_floats();
    walk.entries_at = overlap ? TILES_AT : behind;
    walk.written_at = overlap ? behind : behind + lists;

    const auto step_at = [&](int step) {
        const long long call = static_cast<long long>(step) * P + p;
        return Step{chunk_of(step, p, T, C, lengths, cu_seqlens, wide), call,
                    slice * slab_chunks + (step - slab_step) * P + p, slot_count[call], read_slot_count[call]};
    };
    // Each phase computes its own addresses, so that registers hold those of no other.
    const auto renewed = [&walk] {
        ptx::renew(walk.thread);
        ptx::renew(walk.slice);
        ptx::renew(walk.D);
        ptx::renew(walk.rank);
        ptx::renew(walk.blocks);
        return walk;
    };
    const auto gwr = [&] { return Gwr{renewed()}; };
    const auto update = [&] { return Update{renewed()}; };
    const auto written_rows = [&] { return WrittenRows{renewed()}; };
    const auto read_rows = [&] { return ReadRows{renewed()}; };
    const int last = slab_step + static_cast<int>(chunks_of_slab(slab_step, slab_chunks, P, T, C) / P) - 1;
    Step step = step_at(last);
    if (!overlap) gwr().fetch_lists(step.call, step.chunk);
    arrive();
    wait();
    for (int s = last; s >= slab_step; --s) {
        walk.fetch_readings(step);
        if (overlap) gwr().fetch_lists(step.call, step.chunk);
        Update::Job ahead{};
        if (!overlap) ahead = update().start(step);
        gwr().run(step);
        ReadRows::Cursor cursor = read_rows().start(step);
        ptx::copy_wait<0>();
        arrive();
        if (!overlap && s > slab_step) {
            const long long call = step.call - P;
            gwr().fetch_lists(call, chunk_of(s - 1, p, T, C, lengths, cu_seqlens, wide));
        }
        wait();           // gwr is whole
        __syncthreads();  // compute-sanitizer's racecheck sees no order in a barrier whose arrive and wait lie apart
        if (overlap) ahead = update().start(step);
        WrittenRows::Held held{};
        // The code of the read slots stands once, for the three places where it fills a wait.
#pragma unroll 1
        for (int part = 0; part < 3; ++part) {
            const int beside = update().idle() ? UNITS_BESIDE_UPDATE : 0;
            read_rows().run(step, cursor, part == 0 ? beside : part == 1 ? 1 : step.read_slots);
            if (part == 0) {
                update().run(step, ahead, !overlap);
                held = written_rows().load_held(step, 0);
                arrive();
            } else if (part == 1) {
                wait();  // lam is whole
                written_rows().run(step, held);
            }
        }
        arrive();
        if (s > slab_step) step = step_at(s - 1);
        wait();  // the rows are written
    }
}
