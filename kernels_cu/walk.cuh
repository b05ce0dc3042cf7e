// What one block of the persistent forward knows on its walk: the call, its place in its cluster, its shared memory.
// Macros as in persistent_forward.cu.
#pragma once

#include "chunk.cuh"
#include "entries.cuh"
#include "numeric.cuh"

#define SAVE (SNAPSHOT != 0)
#define TILE 64       // columns of a tile of X, QX or A
#define MAX_PAIRS 16  // pairs of rows of a tile
#define BATCH 4       // rows of a thread that are asked for together, in the gather and in decay and write
#define WARPS (THREADS / 32)
#define WORDS (COLUMNS / VECTOR)                 // of a row's slice
#define ROWS (THREADS / WORDS)                   // rows side by side
#define WIDTH 2                                  // columns of a thread in the products
#define GROUPS (COLUMNS / WIDTH)                 // of threads across a slice, in the products
#define PLANES (VECTOR > 4 ? VECTOR / 4 : 1)     // of a row in shared memory
#define WARP_ROWS (WORDS < 32 ? 32 / WORDS : 1)  // rows side by side in a warp
#define ROW_WARPS (WORDS > 32 ? WORDS / 32 : 1)  // warps across a row
#define UNIT (WARP_ROWS * BATCH)                 // slots that a warp writes together
#define AHEAD 2                                  // first terms of a slot that come with its row

using BankWord = Word<BANK, VECTOR>;

struct __align__(8) Entry {
    int slot;  // -1 where absent
    float weight;
};
struct __align__(8) FirstTerm {
    float weight;
    int code;
};

struct Step {
    Chunk chunk;
    long long n;     // the chunk, of the slab
    long long call;  // the chunk, of the call
    int slots;       // that it writes
};

static __device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// A slice of a row in shared memory lies in planes of four columns a word, so that the threads of a warp meet no bank
// of it twice.
static __device__ __forceinline__ void store_slice(float* row, int word, const float (&x)[VECTOR]) {
    if constexpr (VECTOR >= 4) {
#pragma unroll
        for (int h = 0; h < PLANES; ++h)
            *reinterpret_cast<float4*>(row + h * (COLUMNS / PLANES) + word * 4) =
                make_float4(x[4 * h], x[4 * h + 1], x[4 * h + 2], x[4 * h + 3]);
    } else {
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) row[word * VECTOR + c] = x[c];
    }
}
static __device__ __forceinline__ void load_slice(const float* row, int word, float (&x)[VECTOR]) {
    if constexpr (VECTOR >= 4) {
#pragma unroll
        for (int h = 0; h < PLANES; ++h) {
            const float4 four = *reinterpret_cast<const float4*>(row + h * (COLUMNS / PLANES) + word * 4);
            x[4 * h] = four.x, x[4 * h + 1] = four.y, x[4 * h + 2] = four.z, x[4 * h + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) x[c] = row[word * VECTOR + c];
    }
}

// A column of a stream's rows, as far apart as a 32-bit number of words can say.
struct Rows {
    BANK* first;
    unsigned words_apart;

    __device__ __forceinline__ BANK* row(int slot) const {
        const unsigned long long words = static_cast<unsigned long long>(words_apart) * static_cast<unsigned>(slot);
        return first + words * VECTOR;
    }
};

// One block's walk: the call, its own place, its shared memory.
struct Walk {
    BANK* memory;
    const void *k_idx, *q_idx;
    const BANK* v;
    const float *k_eff, *q_w, *x, *qx, *a, *strength;
    const SlotRecord* slots;
    const int* slot_count;
    const WriteTerm* write_terms;
    BANK* readings;
    float* err;
    void* snapshot;
    long long row_stride, first_slot, capacity;
    long long first_kept;                                 // the chunk, of the call, whose rows lie first in snapshot
    int C, W, R, S, D, groups, group_shift, list_tokens;  // groups is 1 << group_shift
    bool wide_index, in_place, v_words;

    int slice, rank, blocks;
    int own;                  // tokens of this block; the last may lie at C
    int pairs, passes, side;  // pairs of rows and columns of a tile
    BankWord* ring;           // [RING, BATCH, THREADS], rows on their way
    SlotRecord* records;      // [WARPS, RING, UNIT]
    FirstTerm* first_terms;   // [WARPS, RING, AHEAD, UNIT]: term 0 of each slot, then term 1
    float* tiles;             // [2 stages, 2, 2 pairs, side + 4]
    float* weight;            // [C], strength
    float* inter;             // [own, COLUMNS]
    Entry* entries;           // [list_tokens, W + R], reads behind writes, each group by group
    float* waiting;           // the same, weights of 64-bit indices on their way
    float *residual, *delta;  // [C, COLUMNS]

    __device__ __forceinline__ Rows rows_at(int column) const {
        Rows rows{memory + first_slot * row_stride + column, static_cast<unsigned>(row_stride / VECTOR)};
        ptx::renew(rows.first);
        ptx::renew(rows.words_apart);
        return rows;
    }
    // Where row `l` of batch `batch` arrives: a thread copies and reads its own words alone, so no barrier is needed. A
    // copy, unlike a load, takes no register, and RING batches can be waited for one after another.
    __device__ __forceinline__ BankWord* arrival(int batch, int l) const {
        return ring + (batch * BATCH + l) * THREADS + threadIdx.x;
    }
    template <class... Eviction>
    __device__ __forceinline__ void ask_row(BankWord* to, const BANK* from, Eviction... eviction) const {
        if constexpr (sizeof(BankWord) == 16)
            ptx::copy_async_16(to, from, eviction...);
        else if constexpr (sizeof(BankWord) == 8)
            ptx::copy_async_8(to, from, eviction...);
        else if constexpr (sizeof(BankWord) == 4)
            ptx::copy_async_4(to, from, eviction...);
        else  // too narrow for an asynchronous copy
            *to = ptx::load_global(reinterpret_cast<const BankWord*>(from));
    }
    // Token `t` of this block.
    __device__ __forceinline__ int token(int t) const {
        return 2 * (rank + blocks * (t / 2)) + t % 2;
    }
};
