// Where the tokens of a chunk lie, and whether an index is a slot of its stream.
//
// Chunks are numbered step by step: chunk n of a call is chunk n / P of stream n % P. Phase 1 runs for a slab of steps
// from `slab_step` on, and its arrays [chunks, ...] hold the chunks of one slab.
#pragma once

#include "ptx.cuh"

// A chunk of a call. Its token i is row first_row + i of the flat token tensors
// [rows, *]; tokens i >= `tokens` are padding, and padding rows exist only below `rows`.
struct Chunk {
    int stream;
    int tokens;
    int rows;
    long long first_row;
};

// The chunk of stream `p` at `step`. `lengths` [P] or `cu_seqlens` [P+1], or neither: every stream has T tokens. `wide`
// tells whether they are 64-bit.
static __device__ __forceinline__ Chunk chunk_of(long long step, int p, int T, int C, const void* lengths,
                                                 const void* cu_seqlens, int wide) {
    const long long before = step * C;  // the stream's tokens in earlier chunks
    long long start = static_cast<long long>(p) * T, length = T, room = T;
    if (cu_seqlens != nullptr) {
        const int* narrow = static_cast<const int*>(cu_seqlens);
        const long long* full = static_cast<const long long*>(cu_seqlens);
        start = wide ? ptx::load_readonly(full + p) : ptx::load_readonly(narrow + p);
        length = (wide ? ptx::load_readonly(full + p + 1) : ptx::load_readonly(narrow + p + 1)) - start;
        room = length;
    } else if (lengths != nullptr) {
        length = wide ? ptx::load_readonly(static_cast<const long long*>(lengths) + p)
                      : ptx::load_readonly(static_cast<const int*>(lengths) + p);
    }
    const auto within = [C](long long count) { return static_cast<int>(count < 0 ? 0 : count < C ? count : C); };
    const int rows = within(room - before);
    return Chunk{p, min(within(length - before), rows), rows, start + before};
}

static __device__ __forceinline__ Chunk chunk_at(long long n, int P, int T, int C, const void* lengths,
                                                 const void* cu_seqlens, int wide) {
    const long long step = n / P;
    return chunk_of(step, static_cast<int>(n - step * P), T, C, lengths, cu_seqlens, wide);
}

// Chunks of the slab that begins at `slab_step`, of at most `slab_chunks`.
static __device__ __forceinline__ long long chunks_of_slab(int slab_step, int slab_chunks, int P, int T, int C) {
    const long long left = (static_cast<long long>(T + C - 1) / C - slab_step) * P;
    return left < slab_chunks ? left : slab_chunks;
}

// The slot of a bank row within its stream, whose rows begin at `first`; -1 where it is absent.
static __device__ __forceinline__ int slot_within(long long row, long long first, int S) {
    const long long slot = row - first;
    return slot >= 0 && slot < S ? static_cast<int>(slot) : -1;
}
