// Rows of a bank, of its gradient, of a snapshot and of token vectors, as the lanes of a warp hold them.
//
// Lane x of a warp holds words x, x + 32, .. of a row; a word is as many columns as 16 bytes of the bank's format hold.
// So which lane sums which column follows from D and the format alone. Where rows are aligned to fewer bytes, a word is
// loaded in pieces of VECTOR values, which divides D.
//
// Needs the macros BANK, VECTOR and LOADS (words of a lane in a slice of a row). Where ROWS_ONCE is 1, what is loaded and
// stored of rows leaves L2 first: nobody needs it there soon.
#pragma once

#include "snapshot.cuh"

constexpr int WORD = 16 / static_cast<int>(sizeof(BANK));  // columns of a word
constexpr int SLICE = 32 * WORD * LOADS;                   // columns that a warp holds at once

// Values of the format T in a piece of VECTOR columns, at most 16 bytes.
template <class T>
constexpr int piece_of = VECTOR * static_cast<int>(sizeof(T)) > 16 ? 16 / static_cast<int>(sizeof(T)) : VECTOR;

template <class W>
__device__ __forceinline__ W load_piece(const W* from) {
#if ROWS_ONCE
    return ptx::load_global(from, ptx::evict_first());
#else
    return ptx::load_global(from);
#endif
}
template <class W>
__device__ __forceinline__ void store_piece(W* to, W piece) {
#if ROWS_ONCE
    ptx::store_global(to, piece, ptx::evict_first());
#else
    ptx::store_global(to, piece);
#endif
}

// A lane's words of one slice of a row of format T, as they lie in memory; 0 beyond column D.
template <class T>
struct RowSlice {
    static constexpr int PIECE = piece_of<T>, PIECES = WORD / PIECE;
    Word<T, PIECE> piece[LOADS][PIECES];

    // Past L1.
    __device__ __forceinline__ void load(const T* row, int column, int D) {
#pragma unroll
        for (int l = 0; l < LOADS; ++l)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int at = column + l * 32 * WORD + i * PIECE;
                piece[l][i] = Word<T, PIECE>{};
                if (at < D) piece[l][i] = load_piece(reinterpret_cast<const Word<T, PIECE>*>(row + at));
            }
    }
    // Through L1: rows that other warps of the block read too.
    __device__ __forceinline__ void load_shared_row(const T* row, int column, int D) {
#pragma unroll
        for (int l = 0; l < LOADS; ++l)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int at = column + l * 32 * WORD + i * PIECE;
                piece[l][i] = Word<T, PIECE>{};
                if (at < D) piece[l][i] = *reinterpret_cast<const Word<T, PIECE>*>(row + at);
            }
    }
    // The bits as they were loaded.
    __device__ __forceinline__ void store(T* row, int column, int D) const {
#pragma unroll
        for (int l = 0; l < LOADS; ++l)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int at = column + l * 32 * WORD + i * PIECE;
                if (at < D) store_piece(reinterpret_cast<Word<T, PIECE>*>(row + at), piece[l][i]);
            }
    }
    __device__ __forceinline__ void word(int l, float (&x)[WORD]) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            float values[PIECE];
            ::unpack<T, PIECE>(piece[l][i], values);
#pragma unroll
            for (int c = 0; c < PIECE; ++c) x[i * PIECE + c] = values[c];
        }
    }
};

// Stores a word of a row of format T, where it lies inside the row.
template <class T>
__device__ __forceinline__ void store_word(T* row, int at, int D, const float (&x)[WORD]) {
    constexpr int PIECE = piece_of<T>;
#pragma unroll
    for (int i = 0; i < WORD / PIECE; ++i) {
        float values[PIECE];
#pragma unroll
        for (int c = 0; c < PIECE; ++c) values[c] = x[i * PIECE + c];
        if (at + i * PIECE < D)
            store_piece(reinterpret_cast<Word<T, PIECE>*>(row + at + i * PIECE), pack<T, PIECE>(values));
    }
}

// ---- dots over columns ----

// Of a row, in one tree for every schedule: each lane sums the columns of a word upwards, the 16 words of a block of 256
// bytes of the bank's format are added by a butterfly (lanes 4, 2 and 1 apart, then 8), the blocks of the row in order.

// Adds the blocks of one slice to `total`, of which the first slice needs no value. share[l] is this lane's sum of its
// word l; `column` is the slice's first. Every lane gets the sum to its own `total`.
__device__ __forceinline__ float add_blocks(float total, const float (&share)[LOADS], int column, int D) {
    static_assert(LOADS == 1 || LOADS == 2 || LOADS == 4);
    const int lane = threadIdx.x % 32;
    // Lanes 4 and 2 apart share out the words, so that each lane ends with one: word 2 (lane & 4) + (lane & 2).
    float sum;
    if constexpr (LOADS == 4) {
        const bool upper = lane & 4, odd = lane & 2;
        const float even = (upper ? share[2] : share[0]) + __shfl_xor_sync(~0u, upper ? share[0] : share[2], 4);
        const float other = (upper ? share[3] : share[1]) + __shfl_xor_sync(~0u, upper ? share[1] : share[3], 4);
        sum = (odd ? other : even) + __shfl_xor_sync(~0u, odd ? even : other, 2);
    } else if constexpr (LOADS == 2) {
        const bool upper = lane & 4;
        sum = (upper ? share[1] : share[0]) + __shfl_xor_sync(~0u, upper ? share[0] : share[1], 4);
        sum += __shfl_xor_sync(~0u, sum, 2);
    } else {
        sum = share[0] + __shfl_xor_sync(~0u, share[0], 4);
        sum += __shfl_xor_sync(~0u, sum, 2);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 8);
#pragma unroll
    for (int block = 0; block < 2 * LOADS; ++block) {
        const int word = block / 2, first = block % 2 * 16;
        const int source = first + (LOADS == 4 ? word / 2 * 4 + word % 2 * 2 : word * 4);
        const float of_block = __shfl_sync(~0u, sum, source);
        const int at = column + block * 16 * WORD;
        if (at == 0)
            total = of_block;
        else if (at < D)
            total += of_block;
    }
    return total;
}

// ---- snapshots ----

// SNAPSHOT: 1 in the bank's format, 2 Bf16 (decay_write.cu), 3 fp8, 4 int4 (keep_rows.cu).
#ifdef SNAPSHOT
template <class Slice>
__device__ __forceinline__ void restore_words(const Slice& kept, BANK* row, int column, int D) {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        float values[WORD];
        kept.word(l, values);
        store_word(row, column + l * 32 * WORD, D, values);
    }
}

#if SNAPSHOT <= 2
#if SNAPSHOT == 1
using Kept = BANK;
#else
using Kept = Bf16;
#endif

// A lane's words of a slice of a kept row.
struct KeptSlice {
    RowSlice<Kept> slice;

    __device__ __forceinline__ void load(const void* snapshot, const float*, long long row, int column, int D) {
        slice.load(static_cast<const Kept*>(snapshot) + row * D, column, D);
    }
    __device__ __forceinline__ void word(int l, float (&x)[WORD]) const {
        slice.word(l, x);
    }
    // Writes the slice to the row of the bank it was kept of.
    __device__ __forceinline__ void restore(BANK* row, int column, int D) const {
#if SNAPSHOT == 1
        slice.store(row, column, D);
#else
        restore_words(*this, row, column, D);
#endif
    }
};
#else
// Bytes of a piece of VECTOR values.
constexpr int KEPT_BYTES = SNAPSHOT == 3 ? VECTOR : VECTOR > 1 ? VECTOR / 2 : 1;

// Loads N bytes, a power of two, at an address that is a multiple of N.
template <int N>
__device__ __forceinline__ void load_bytes(const unsigned char* p, unsigned char (&bytes)[N]) {
    if constexpr (N == 1) {
        bytes[0] = *p;
    } else {
        const auto word = load_piece(reinterpret_cast<const typename WordOf<N>::type*>(p));
        memcpy(bytes, &word, N);
    }
}

struct KeptSlice {
    unsigned char byte[LOADS][WORD / VECTOR][KEPT_BYTES];
    float scale;

    __device__ __forceinline__ void load(const void* snapshot, const float* scales, long long row, int column, int D) {
        const long long bytes = SNAPSHOT == 3 ? D : (D + 1) / 2;
        const unsigned char* const kept = static_cast<const unsigned char*>(snapshot) + row * bytes;
#pragma unroll
        for (int l = 0; l < LOADS; ++l)
#pragma unroll
            for (int i = 0; i < WORD / VECTOR; ++i) {
                const int at = column + l * 32 * WORD + i * VECTOR;
                if (at >= D) continue;
                const unsigned char* const from = kept + (SNAPSHOT == 3 ? at : at / 2);
                load_bytes(from, byte[l][i]);
            }
        scale = scales[row];
        first = column;
        columns = D;
    }
    __device__ __forceinline__ void word(int l, float (&x)[WORD]) const {
#pragma unroll
        for (int i = 0; i < WORD / VECTOR; ++i)
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) {
                const int at = first + l * 32 * WORD + i * VECTOR + c;
                float value = 0.0f;
                if (at < columns) {
#if SNAPSHOT == 3
                    value = fp8_to_float(byte[l][i][c]) * scale;
#else
                    const int level = byte[l][i][c / 2] >> (VECTOR > 1 ? c % 2 : at % 2) * 4 & 0xf;
                    value = (static_cast<float>(level) - 7.5f) * scale;
#endif
                }
                x[i * VECTOR + c] = value;
            }
    }
    __device__ __forceinline__ void restore(BANK* row, int column, int D) const {
        restore_words(*this, row, column, D);
    }

  private:
    int first, columns;
};
#endif
#endif
