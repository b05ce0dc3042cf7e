// Phase-1 backward, the sums over pairs of entries that share a slot. Of an entry with weight w at token i, and its
// partners p, with the decay E of the pair (exp of the later entry's L less the earlier one's, exact):
//
//     d_row  = sum over K p at tokens j < i of d_A[i, j] w_p E             (of a K entry)
//     d_col  = sum over K p at tokens j > i of d_A[j, i] w_p E             (of a K entry)
//     d_kvqk = sum over Q p at tokens j >= i of d_QK[j, i] w_p E           (of a K entry)
//     d_qv   = sum over K p at tokens j <= i of d_QK[i, j] w_p E           (of a Q entry)
//     value_sums = d_row + d_col + d_kvqk        log_sums = w (d_row - d_col - d_kvqk)     of a K entry
//     value_sums = d_qv                          log_sums = w d_qv                         of a Q entry
//
// A pair without an owner entry at the tokens after the earlier one up to the later one has E = 1 whatever the gates:
// its term stays out of log_sums. Two K entries of different tokens always have one; a K and a Q entry have none where
// the K entry's token is the latest that writes the slot up to the Q entry's token.
//
// Macros  BATCH (0, 1): how the records of partners arrive, a few at a time in registers, or each behind the one in
//         use, in shared memory. Both give the same bits.
// Grid    (chunks * ceil(C (W + R) / (each THREADS))): the blocks of a chunk are neighbours.
// Block   THREADS threads for `each` (up to EACH) times as many entries: the chunk's K entries in sorted order, then its
//         Q entries. Few entries share a slot, and to find out takes few loads, so those that do are listed first: then
//         an entry a thread.
// Reads   write_entries, write_terms [chunks, C W], read_entries, read_terms [chunks, C R], slots, slot_reads [chunks,
//         min(C W, S)], slot_count [chunks], read_slots [chunks, min(C R, S)], read_slot_count [chunks] (entries.cuh);
//         d_a, d_qk [chunks, C, C], of d_a nothing on or above the diagonal, of d_qk nothing above it.
// Writes  value_sums, log_sums [chunks, C (W + R)]: of K entries from 0 on, of Q entries from C W on, in sorted order.
// Sums    compensated, each in sorted order of the partners: those before; later writes, then later reads; those
//         without an owner between.
// Shared  static: the list; with BATCH a record a thread.
#include "phase1_backward.cuh"

#define THREADS 256
#define EACH 4     // entries that a thread looks at, at most
#define AT_ONCE 4  // records of partners in registers
#define ALL 0xffffffffu

enum class Partner { EARLIER, LATER, UNOWNED };

// What an entry's pairs have in common; the cell of a partner at token j is cells[j * stride].
struct Pairs {
    const EntryRecord* partners;
    const float* cells;
    int stride;
    LogDecay own;

    __device__ __forceinline__ EntryRecord partner(int at) const {
        const uint4 word = ptx::load_readonly(reinterpret_cast<const uint4*>(partners + at));
        EntryRecord record;
        memcpy(&record, &word, sizeof(record));
        return record;
    }
    __device__ __forceinline__ float cell(const EntryRecord& partner) const {
        return ptx::load_readonly(cells + partner.token() * stride);
    }
    template <Partner Kind>
    __device__ __forceinline__ float term(float cell, const EntryRecord& partner) const {
        const float term = cell * partner.weight;
        if constexpr (Kind == Partner::EARLIER) return term * exp_of(own - partner.log());
        if constexpr (Kind == Partner::LATER) return term * exp_of(partner.log() - own);
        return term;
    }
};

// Where the record behind the one in use arrives.
static __device__ __forceinline__ EntryRecord* record_behind() {
    __shared__ EntryRecord records[THREADS];
    return records + threadIdx.x;
}

// Adds the terms of partners begin .. end.
template <Partner Kind, bool Batch = BATCH>
static __device__ __forceinline__ void add_pairs(CompensatedSum& sum, const Pairs& pairs, int begin, int end) {
    if constexpr (Batch) {
        EntryRecord* const mine = record_behind();
        const auto fetch = [&](int at) {
            if (at >= end) return;
            ptx::copy_async_16(mine, pairs.partners + at);
            ptx::copy_commit();
        };
        fetch(begin);
        for (int at = begin; at < end; ++at) {
            ptx::copy_wait<0>();
            const EntryRecord partner = *mine;
            const float cell = pairs.cell(partner);
            fetch(at + 1);
            sum.add(pairs.term<Kind>(cell, partner));
        }
    } else {
        int at = begin;
        for (; at + AT_ONCE <= end; at += AT_ONCE) {
            EntryRecord partner[AT_ONCE];
            float cell[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) partner[i] = pairs.partner(at + i);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) cell[i] = pairs.cell(partner[i]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) sum.add(pairs.term<Kind>(cell[i], partner[i]));
        }
        for (; at < end; ++at) {
            const EntryRecord partner = pairs.partner(at);
            sum.add(pairs.term<Kind>(pairs.cell(partner), partner));
        }
    }
}

// The first of the entries begin .. end, ascending by token, at `token` or later; `end` where there is none.
static __device__ __forceinline__ int first_at(const EntryRecord* entries, int begin, int end, int token) {
    while (begin < end) {
        const int middle = (begin + end) / 2;
        if (entries[middle].token() < token)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    phase1_backward_pairs(const EntryRecord* write_entries, const WriteTerm* write_terms,
                          const EntryRecord* read_entries, const ReadTerm* read_terms, const SlotRecord* slots,
                          const int2* slot_reads, const int* slot_count, const ReadSlot* read_slots,
                          const int* read_slot_count, const float* d_a, const float* d_qk, float* value_sums,
                          float* log_sums, int C, int W, int R, int S, int each) {
    __shared__ unsigned short list[EACH * THREADS];
    __shared__ int listed;
    const int count = each * THREADS, blocks = (C * (W + R) + count - 1) / count;
    const long long n = blockIdx.x / blocks;
    const int first_place = blockIdx.x % blocks * count;
    write_entries += n * C * W, write_terms += n * C * W;
    read_entries += n * C * R, read_terms += n * C * R;
    slots += n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
    slot_reads += n * min(static_cast<long long>(C) * W, static_cast<long long>(S));
    read_slots += n * min(static_cast<long long>(C) * R, static_cast<long long>(S));
    d_a += n * C * C, d_qk += n * C * C;
    value_sums += n * C * (W + R), log_sums += n * C * (W + R);

    const int writes = entries_of(slots, slot_count[n]);
    const int entries = min(writes + entries_of(read_slots, read_slot_count[n]), first_place + count);  // up to here
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    int known[EACH];  // of a K entry its slot, of a Q entry how many writes it meets
    bool shares[EACH];
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        const int place = first_place + b * THREADS + threadIdx.x;
        known[b] = 0;
        if (place < entries) known[b] = place < writes ? write_terms[place].slot : read_terms[place - writes].writes;
    }
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        const int place = first_place + b * THREADS + threadIdx.x;
        shares[b] = known[b] > 0;
        if (place < min(writes, entries)) shares[b] = slots[known[b]].count > 1 || slot_reads[known[b]].y > 0;
    }
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        const int offset = b * THREADS + threadIdx.x, place = first_place + offset;
        if (place < entries && !shares[b]) {
            const int out = place < writes ? place : C * W + place - writes;
            value_sums[out] = 0.0f, log_sums[out] = 0.0f;
        }
        const unsigned votes = __ballot_sync(ALL, shares[b]);
        int to = 0;
        if (threadIdx.x % 32 == 0 && votes != 0) to = atomicAdd(&listed, __popc(votes));
        to = __shfl_sync(ALL, to, 0) + __popc(votes & (1u << threadIdx.x % 32) - 1);
        if (shares[b]) list[to] = static_cast<unsigned short>(offset);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < listed; i += THREADS) {
        const int place = first_place + list[i];
        const bool query = place >= writes;
        const int at = query ? place - writes : place;
        // Ranges of partners in sorted order.
        int earlier = 0, earlier_end = 0;          // K entries before
        int later = 0, later_end = 0;              // K entries after
        int later_reads = 0, later_reads_end = 0;  // Q entries, with an owner between
        int unowned = 0, unowned_end = 0;          // Q entries of a K entry, K entries of a Q entry
        EntryRecord entry;
        if (query) {
            const ReadTerm term = read_terms[at];
            entry = read_entries[at];
            earlier = term.first_write, unowned_end = term.first_write + term.writes;
            unowned = first_at(write_entries, earlier, unowned_end - 1, write_entries[unowned_end - 1].token());
            earlier_end = unowned;
        } else {
            const int written = write_terms[at].slot;
            const SlotRecord slot = slots[written];
            const int2 reads = slot_reads[written];
            entry = write_entries[at];
            const int token = entry.token();
            earlier = slot.first, later_end = slot.first + slot.count, later_reads_end = reads.x + reads.y;
            earlier_end = first_at(write_entries, earlier, at, token);
            later = first_at(write_entries, at + 1, later_end, token + 1);
            unowned = first_at(read_entries, reads.x, later_reads_end, token);
            later_reads = later_reads_end;
            if (later < later_end)
                later_reads = first_at(read_entries, unowned, later_reads_end, write_entries[later].token());
            unowned_end = later_reads;
        }

        const int token = entry.token();
        const LogDecay own = entry.log();
        const float* const row_cells = (query ? d_qk : d_a) + token * C;
        const Pairs before{write_entries, row_cells, 1, own};
        const Pairs after{write_entries, d_a + token, C, own};
        const Pairs reads_after{read_entries, d_qk + token, C, own};
        const Pairs without_owner{query ? write_entries : read_entries, query ? row_cells : d_qk + token, query ? 1 : C,
                                  own};
        CompensatedSum row = empty_sum(), column = empty_sum(), outside = empty_sum();
        add_pairs<Partner::EARLIER>(row, before, earlier, earlier_end);
        add_pairs<Partner::LATER>(column, after, later, later_end);
        add_pairs<Partner::LATER>(column, reads_after, later_reads, later_reads_end);
        add_pairs<Partner::UNOWNED>(outside, without_owner, unowned, unowned_end);

        CompensatedSum value = row, log = row;
        value.add(column), value.add(outside);
        log.add(-column);
        const int out = query ? C * W + at : at;
        value_sums[out] = value.total();
        log_sums[out] = entry.weight * log.total();
    }
}
