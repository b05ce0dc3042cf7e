// Teams of lanes that walk the slots of a chunk one after another, each the only writer of its slots' rows.
//
// A warp is one team or, where a row has at most 16 words, two. Teams of a warp go through the same loops, so that all
// its lanes meet in the sums; a team without a slot or an entry takes part with zeros.
//
// Needs the macros of rows.cuh and LANES (of a team: 32, or 16 where D is at most 16 words).
#pragma once

#define ROWS_ONCE 1
#include "rows.cuh"

#define TEAMS (32 / LANES)  // of a warp
// Blocks of 256 threads an SM: as many as rows of this turn and of the next fit the registers of. Narrow values that are
// loaded one by one take a register each.
constexpr int BLOCKS = LOADS == 1 ? 3 : LOADS == 4 && VECTOR == 1 && sizeof(BANK) == 2 ? 1 : 2;
static_assert(LANES == 32 || (LANES == 16 && LOADS == 1));

// The most entries that a team of this warp has.
static __device__ __forceinline__ int most_of_teams(int count) {
    return TEAMS == 1 ? count : max(count, __shfl_xor_sync(~0u, count, 16));
}

// x as lane `lane` of this team has it.
template <class T>
static __device__ __forceinline__ T of_lane(T x, int lane) {
    return __shfl_sync(~0u, x, lane, LANES);
}

// Packed words as they are, but unpacked after this point: not once before a loop, in registers for all its turns.
template <class T>
static __device__ __forceinline__ void renew_words(T& packed) {
    unsigned words[sizeof(T) / sizeof(unsigned)];
    memcpy(words, &packed, sizeof(T));
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(T) / sizeof(unsigned)); ++w) ptx::renew(words[w]);
    memcpy(&packed, words, sizeof(T));
}

// Asks for the rows of gr that entries read.
struct Incoming {
    const BANK* grad_readings;  // of the chunk's first token
    RowSlice<BANK> row;

    template <class Term>
    __device__ __forceinline__ void load(const Term& term, int column, int D) {
        row.load_shared_row(grad_readings + static_cast<long long>(term.token()) * D, column, D);
    }
};

// add_blocks (rows.cuh) for a team.
static __device__ __forceinline__ float add_team(float total, const float (&share)[LOADS], int column, int D) {
    if constexpr (LANES == 32) {
        return add_blocks(total, share, column, D);
    } else {  // a row is one block
        float sum = share[0];
#pragma unroll
        for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        return sum + __shfl_xor_sync(~0u, sum, 8);
    }
}

// Adds the dot of an entry over one slice of its row to `*out`, which the first slice sets: where the team has one.
static __device__ __forceinline__ void add_dot(bool given, float* out, const float (&share)[LOADS], int slice, int D) {
    const bool writes = threadIdx.x % LANES == 0 && given;
    const float before_slice = writes && slice > 0 ? *out : 0.0f;
    const float sum = add_team(before_slice, share, slice, D);
    if (writes) *out = sum;
}
