// The steps of a walk, all of a slab or walk_steps of them, in one launch. Columns are independent, so a cluster walks
// the steps of one column slice of one stream by itself, with cluster barriers where the stepwise schedule ends a
// kernel. Every sum has the order of gather, dual_matmul and decay_write, so the bits are theirs.
//
//     residual = v - sum k_eff M0[k_idx]      inter = sum q_w M0[q_idx]                              gather
//     u = strength residual      delta = X u      y = QX u + inter      err = residual - tril(A, -1) delta
//     M1[s] = cpe(s) M0[s] + sum of weight delta[token]; what M0[s] held is kept                     decay and write
//
// Clusters that start at once all want rows at the same time, and then none; so they start over start_spread cycles.
//
// The blocks of a cluster own pairs of tokens in turn: they gather for these tokens and compute their rows of the
// products. Every block holds residual and delta of all tokens, inter stays with its owner; written slots go to the
// warps of the cluster in turn.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (bank values of one load), COLUMNS (of a slice, a multiple of 32), THREADS
//         (of a block), RING (batches of rows that a thread has under way), SNAPSHOT (0 nothing kept, 1 err and rows
//         in the bank's format, 2 err and rows in Bf16).
// Grid    (blocks of a cluster * slices, P streams). Cluster: 1 to 8 blocks of one slice. Block: THREADS.
// Reads   memory [P*S, D] (rows row_stride values apart); k_idx [rows, W], q_idx [rows, R] (64-bit where wide_index),
//         v [rows, D]; k_eff [chunks, C, W], q_w [chunks, C, R], x, qx, a [chunks, C, C], strength [chunks, C],
//         slots [chunks, capacity], slot_count [chunks], write_terms [chunks, C W] of the slab; lengths, cu_seqlens
//         (chunk.cuh); capacity = min(C W, S).
// Writes  readings [rows, D] (0 on padding; aligned to 16 bytes), rows of memory, err [all chunks, C, D] (aligned to
//         16 bytes), snapshot [all chunks, capacity, D]; where walk_rows [chunks of the walk, capacity, D] is not null,
//         the rows go there instead (SNAPSHOT 1), for keep_rows to quantize.
// Sums    rows of a token: groups n = group, group + groups, .. in turn, then the groups in order; products: over j
//         upwards; terms of a slot in sorted order onto the decayed row.
// Shared  dynamic, in order: the rows under way, records and first terms of their slots, two stages of two tiles,
//         strength [C], inter [own tokens, COLUMNS], list_tokens lists of W + R entries, residual [C, COLUMNS], delta
//         [C, COLUMNS] (where in_place, in residual's place). plan/persistent.py adds them up.
#include "walk_gather.cuh"
#include "walk_products.cuh"
#include "walk_write.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    persistent_forward(BANK* memory, const void* k_idx, const void* q_idx, const BANK* v, const float* k_eff,
                       const float* q_w, const float* x, const float* qx, const float* a, const float* strength,
                       const SlotRecord* slots, const int* slot_count, const WriteTerm* write_terms,
                       const void* lengths, const void* cu_seqlens, BANK* readings, float* err, void* snapshot,
                       BANK* walk_rows, long long row_stride, int step, int slab_step, int slab_chunks, int walk_steps,
                       int P, int T, int C, int W, int R, int S, int D, int shared_bank, int wide, int wide_index,
                       int groups, int list_tokens, int in_place, int start_spread) {
    const int p = blockIdx.y, rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
    const int all_pairs = (C + 1) / 2, most_pairs = (all_pairs + blocks - 1) / blocks;
    const int pairs = min(min(MAX_PAIRS, THREADS / GROUPS), most_pairs);
    const int side = min(TILE, (C + 3) & ~3);

    BankWord* const ring = ptx::dynamic_shared<BankWord>();
    SlotRecord* const records = reinterpret_cast<SlotRecord*>(ring + RING * BATCH * THREADS);
    FirstTerm* const first_terms = reinterpret_cast<FirstTerm*>(records + WARPS * RING * UNIT);
    float* const tiles = reinterpret_cast<float*>(first_terms + WARPS * RING * AHEAD * UNIT);
    float* const weight = tiles + 2 * 2 * 2 * pairs * (side + 4);
    float* const inter = weight + ((C + 3) & ~3);
    Entry* const entries = reinterpret_cast<Entry*>(inter + 2 * most_pairs * COLUMNS);
    float* const waiting = reinterpret_cast<float*>(entries + list_tokens * (W + R));
    float* const residual = reinterpret_cast<float*>(entries) + (list_tokens * (W + R) * (wide_index ? 3 : 2) + 3 & ~3);
    float* const delta = in_place ? residual : residual + C * COLUMNS;

    Walk walk;
    walk.memory = memory, walk.v = v, walk.readings = readings, walk.err = err,
    walk.snapshot = walk_rows == nullptr ? snapshot : walk_rows, walk.row_stride = row_stride;
    walk.k_idx = k_idx, walk.q_idx = q_idx, walk.k_eff = k_eff, walk.q_w = q_w, walk.x = x, walk.qx = qx, walk.a = a,
    walk.strength = strength;
    walk.slots = slots, walk.slot_count = slot_count, walk.write_terms = write_terms;
    walk.C = C, walk.W = W, walk.R = R, walk.S = S, walk.D = D, walk.groups = groups, walk.list_tokens = list_tokens;
    walk.rank = rank, walk.blocks = blocks, walk.pairs = pairs, walk.side = side;
    walk.ring = ring, walk.records = records, walk.first_terms = first_terms, walk.tiles = tiles, walk.weight = weight,
    walk.inter = inter, walk.entries = entries, walk.waiting = waiting, walk.residual = residual, walk.delta = delta;
    walk.first_kept = walk_rows == nullptr ? 0 : static_cast<long long>(step) * P;
    walk.first_slot = shared_bank ? 0 : static_cast<long long>(p) * S;
    walk.capacity = min(static_cast<long long>(C) * W, static_cast<long long>(S));
    walk.group_shift = 0;
    while (1 << walk.group_shift < groups) ++walk.group_shift;
    walk.wide_index = wide_index != 0;
    walk.in_place = in_place != 0;
    walk.v_words = reinterpret_cast<unsigned long long>(v) % sizeof(BankWord) == 0;
    walk.slice = static_cast<int>(blockIdx.x / blocks) * COLUMNS;
    walk.own = 2 * ((all_pairs - rank + blocks - 1) / blocks);
    walk.passes = (most_pairs + pairs - 1) / pairs;
    const int end =
        min(step + walk_steps, slab_step + static_cast<int>(chunks_of_slab(slab_step, slab_chunks, P, T, C) / P));
    const auto step_at = [&](int s) {
        const long long call = static_cast<long long>(s) * P + p, n = call - static_cast<long long>(slab_step) * P;
        return Step{chunk_of(s, p, T, C, lengths, cu_seqlens, wide), n, call, s < end ? slot_count[n] : 0};
    };

    // Each phase computes its own addresses, so that registers hold those of no other.
    const auto renewed = [&walk] {
        ptx::renew(walk.slice);
        ptx::renew(walk.D);
        ptx::renew(walk.rank);
        ptx::renew(walk.blocks);
        return walk;
    };
    const auto gather = [&] { return Gather{renewed()}; };
    const auto products = [&] { return Products{renewed()}; };
    const auto decay_write = [&] { return DecayWrite{renewed()}; };
    const int slices = gridDim.x / blocks, clusters = slices * gridDim.y;
    ptx::idle(static_cast<long long>(start_spread) * (p * slices + static_cast<int>(blockIdx.x) / blocks) / clusters);
    Step now = step_at(step);
    gather().fetch_lists(now, 0);
    gather().resolve_lists(now, 0);
    cluster_sync();
    for (int s = step; s < end; ++s) {
        const Job ahead = products().start(now);
        gather().run(now);
        SlotRecord first[RING], behind[2];
        decay_write().load_records(now, first);
        cluster_sync();  // residual is whole
        products().run(now, ahead, [&] {
            decay_write().ask_first(now, first);
            behind[0] = decay_write().load_record(now, RING);
            behind[1] = decay_write().load_record(now, RING + 1);
        });  // ends, but for err, where delta is whole
        const Step next = step_at(s + 1);
        if (s + 1 < end) gather().fetch_lists(next, 0);
        decay_write().run(now, behind);
        if (s + 1 < end) gather().resolve_lists(next, 0);
        cluster_sync();  // the rows are written
        now = next;
    }
    ptx::copy_wait<0>();  // the last groups are empty
}
