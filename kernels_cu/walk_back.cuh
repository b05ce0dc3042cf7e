// What one block of the persistent backward knows on its walk: the call, its place in its cluster, its shared memory.
// Macros as in persistent_backward.cu.
#pragma once

#define LOADS 1  // words of a lane in a slice of a row (rows.cuh)

#include "chunk.cuh"
#include "entries.cuh"
#include "rows.cuh"

#define WARPS (THREADS / 32)
#define TILE 32       // rows of a tile of X and QX
#define MAX_PAIRS 16  // pairs of columns of a tile
#define WIDE_GRADIENT (sizeof(GRADIENT) > sizeof(BANK))
#define FEW (WIDE_GRADIENT || VECTOR == 1)  // registers: rows are wide, or a value a register
#define BATCH (FEW ? 2 : 4)                 // rows of a lane in the GWR; two batches under way
#define SLOTS (FEW ? 2 : 4)                 // slots of a team under way at once
#define LANES (COLUMNS / WORD)              // of a team, which holds a slice of a row
#define TEAMS (32 / LANES)                  // of a warp
#define UNIT (TEAMS * SLOTS)                // slots of a warp under way at once
#define GROUPS (COLUMNS / 4)                // of four columns, in the d_u update
#define UNITS_BESIDE_UPDATE 2               // of read slots, for a warp without a part in the d_u update
#define PLANES (WORD / 4)                   // of a row in shared memory
#define AHEAD 2                             // first entries of a slot whose terms come with the slot's rows
#define TILES_AT (14 * WARPS * UNIT)        // in shared memory, in floats
static_assert(AHEAD * UNIT <= 32);

struct __align__(8) Entry {
    int slot;  // -1 where absent
    float weight;
};
// One of the first entries of a slot, K or Q: its weight, its lane and token.
struct __align__(8) FirstTerm {
    float weight;
    int code;
};
// The Q entries of a written slot: the first one in sorted order, and how many.
struct __align__(8) Queries {
    int first;
    int count;
};
// Two columns of QX and of X in one row.
struct __align__(16) Factors {
    float2 qx, x;
};

struct Step {
    Chunk chunk;
    long long call;  // the chunk, of the call
    int partial;     // the chunk among the partial sums of all slices
    int slots;       // that it writes
    int read_slots;  // that it reads
};

static __device__ __forceinline__ void arrive() {
    __syncwarp();
    ptx::cluster_arrive();
}
static __device__ __forceinline__ void wait() {
    __syncwarp();
    ptx::cluster_wait();
}

// A slice of a row in shared memory lies in planes of four columns a word. Words of the second plane are turned by four,
// so that neither the words of one plane nor the planes of neighbouring words meet in a bank.
static __device__ __forceinline__ int place_of(int word, int plane) {
    return plane * (COLUMNS / PLANES) + (word ^ plane * 4) * 4;
}
static __device__ __forceinline__ void store_slice(float* row, int word, const float (&x)[WORD]) {
#pragma unroll
    for (int h = 0; h < PLANES; ++h)
        *reinterpret_cast<float4*>(row + place_of(word, h)) =
            make_float4(x[4 * h], x[4 * h + 1], x[4 * h + 2], x[4 * h + 3]);
}
static __device__ __forceinline__ void load_slice(const float* row, int word, float (&x)[WORD]) {
#pragma unroll
    for (int h = 0; h < PLANES; ++h) {
        const float4 four = *reinterpret_cast<const float4*>(row + place_of(word, h));
        x[4 * h] = four.x, x[4 * h + 1] = four.y, x[4 * h + 2] = four.z, x[4 * h + 3] = four.w;
    }
}

// One block's walk: the call, its own place, its shared memory.
struct BackWalk {
    GRADIENT* gradient_bank;
    BANK* memory;
    const void *snapshot, *k_idx;
    const float *snapshot_scale, *write_weight, *err, *strength, *x, *qx;
    const BANK* grad_readings;
    const SlotRecord* slots;
    const WriteTerm* write_terms;
    const Queries* slot_reads;
    const ReadSlot* read_slots;
    const ReadTerm* read_terms;
    float* lam;
    BANK* grad_v;
    float *partial_k_pd, *partial_k_eff, *partial_q_w, *partial_tot;
    long long row_stride, first_slot;
    int capacity, read_capacity, C, W, R, S, D, list_tokens;
    bool wide_index, in_place;

    unsigned thread;
    int slice, rank, blocks;
    int own;            // tokens of this block; the last may lie at C
    int pairs, passes;  // pairs of columns of a tile; tiles beside each other
    // Where arrays begin in shared memory, in floats.
    int weight_at, entries_at, written_at;

    __device__ __forceinline__ int weight_floats() const {
        return (C + 3) & ~3;
    }
    __device__ __forceinline__ int readings_floats() const {
        return C * COLUMNS * static_cast<int>(sizeof(BANK)) / 4;
    }

    template <class T>
    static __device__ __forceinline__ T* shared_at(int floats) {
        return reinterpret_cast<T*>(ptx::dynamic_shared<float>() + floats);
    }
    // This warp's parts of arrays [WARPS, UNIT] of the slots under way.
    template <class T>
    __device__ __forceinline__ T* staged(int floats) const {
        return shared_at<T>(floats) + warp() * UNIT;
    }
    __device__ __forceinline__ SlotRecord* records() const {
        return staged<SlotRecord>(0);
    }
    __device__ __forceinline__ ReadSlot* read_records() const {
        return staged<ReadSlot>(0);
    }
    __device__ __forceinline__ Queries* queries() const {
        return staged<Queries>(4 * WARPS * UNIT);
    }
    // This warp's parts of arrays [WARPS, AHEAD, UNIT]: entry 0 of each slot, then entry 1.
    __device__ __forceinline__ FirstTerm* terms() const {
        return shared_at<FirstTerm>(6 * WARPS * UNIT) + warp() * AHEAD * UNIT;
    }
    __device__ __forceinline__ FirstTerm* query_terms() const {
        return shared_at<FirstTerm>(10 * WARPS * UNIT) + warp() * AHEAD * UNIT;
    }
    // [2 stages, TILE, pairs]
    static __device__ __forceinline__ Factors* tiles() {
        return shared_at<Factors>(TILES_AT);
    }
    // [C], strength
    __device__ __forceinline__ float* weight() const {
        return shared_at<float>(weight_at);
    }
    // [C, COLUMNS], gr
    __device__ __forceinline__ BANK* readings() const {
        return shared_at<BANK>(weight_at + weight_floats());
    }
    // [list_tokens, W]
    __device__ __forceinline__ Entry* entries() const {
        return shared_at<Entry>(entries_at);
    }
    // The same, weights of 64-bit indices on their way.
    __device__ __forceinline__ float* waiting() const {
        return shared_at<float>(entries_at + 2 * list_tokens * W);
    }
    // [C, COLUMNS], gwr
    __device__ __forceinline__ float* written() const {
        return shared_at<float>(written_at);
    }
    // [C, COLUMNS], lam
    __device__ __forceinline__ float* adjoint() const {
        return shared_at<float>(in_place ? written_at : written_at + C * COLUMNS);
    }

    // Token `t` of this block.
    __device__ __forceinline__ int token(int t) const {
        return 2 * (rank + blocks * (t / 2)) + t % 2;
    }
    __device__ __forceinline__ int lane() const {
        return thread % 32;
    }
    __device__ __forceinline__ int warp() const {
        return thread / 32;
    }
    __device__ __forceinline__ int team() const {
        return thread % 32 / LANES;
    }
    // This lane's word of a slice, and its first column.
    __device__ __forceinline__ int word() const {
        return thread % LANES;
    }
    __device__ __forceinline__ int column() const {
        return slice + word() * WORD;
    }
    // Starts copying strength and the chunk's rows of gr; 0 on padding and beyond column D.
    __device__ __forceinline__ void fetch_readings(const Step& step) const {
        for (int i = thread; i < C; i += THREADS) ptx::copy_async_4(weight() + i, strength + step.call * C + i);
        if constexpr (VECTOR == WORD) {
            for (int cell = thread; cell < C * LANES; cell += THREADS) {
                const int i = cell / LANES, at = slice + cell % LANES * WORD;
                BANK* const to = readings() + cell * WORD;
                if (i < step.chunk.tokens && at < D)
                    ptx::copy_async_16(to, grad_readings + (step.chunk.first_row + i) * D + at);
                else
                    *reinterpret_cast<uint4*>(to) = uint4{};
            }
        } else {
            for (int cell = thread; cell < C * COLUMNS; cell += THREADS) {
                const int i = cell / COLUMNS, at = slice + cell % COLUMNS;
                const bool given = i < step.chunk.tokens && at < D;
                readings()[cell] = given ? grad_readings[(step.chunk.first_row + i) * D + at] : BANK{};
            }
        }
        ptx::copy_commit();
    }
    // This lane's word of a row of gr.
    __device__ __forceinline__ void load_readings(int i, float (&x)[WORD]) const {
        const BANK* const from = readings() + i * COLUMNS + word() * WORD;
        unpack<BANK, WORD>(*reinterpret_cast<const Word<BANK, WORD>*>(from), x);
    }

    // Sums N shares over the lanes of each team, in the tree of rows.cuh; afterwards this lane has the sum of share `summed<N>()`. All lanes of the
    // warp take part.
    template <int N>
    __device__ __forceinline__ float add_lanes(float (&share)[N]) const {
        const int lane = this->lane();
#pragma unroll
        for (int apart = 4, count = N / 2; apart > 0; apart /= 2, count /= 2) {
            if (count == 0) share[0] += __shfl_xor_sync(~0u, share[0], apart);
#pragma unroll
            for (int v = 0; v < count; ++v) {
                const bool upper = lane & apart;
                const float kept = upper ? share[v + count] : share[v];
                share[v] = kept + __shfl_xor_sync(~0u, upper ? share[v] : share[v + count], apart);
            }
        }
        if (LANES == 16) share[0] += __shfl_xor_sync(~0u, share[0], 8);
        return share[0];
    }
    template <int N>
    __device__ __forceinline__ int summed() const {
        static_assert(N == 1 || N == 2 || N == 4 || N == 8);
        const int lane = this->lane() % 8;
        return N == 8 ? lane : N == 4 ? lane / 2 : N == 2 ? lane / 4 : 0;
    }
    // Whether this lane is the first of those of its team that have the same sum.
    template <int N>
    __device__ __forceinline__ bool sums_first() const {
        return word() < 8 && word() % (8 / N) == 0;
    }
};
