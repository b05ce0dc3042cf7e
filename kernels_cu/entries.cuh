// The entries of a chunk, one for each (token, lane) of kind K (write) or Q (read), and the records that Phase 1
// keeps of them. Sorted order: slot, token, K before Q, lane; absent and padded entries follow, as they came.
#pragma once

#include "log_decay.cuh"

// A sorted entry, one int of the payload.
enum EntryBits : int {
    LANE_MASK = 0xff,
    TOKEN_SHIFT = 8,
    TOKEN_MASK = 0xff,
    IS_QUERY = 1 << 16,
    IS_VALID = 1 << 17,
    IS_HEAD = 1 << 18,   // first entry of its slot
    IS_OWNER = 1 << 19,  // first K entry of its slot and token: the one that decays
};

static __device__ __forceinline__ int entry_lane(int entry) {
    return entry & LANE_MASK;
}
static __device__ __forceinline__ int entry_token(int entry) {
    return (entry >> TOKEN_SHIFT) & TOKEN_MASK;
}

// Ints of one chunk's payload: C (W + R) rounded up to 16.
static __device__ __forceinline__ int payload_row(int C, int W, int R) {
    return (C * (W + R) + 15) & ~15;
}

// A valid entry in sorted order, among the K or the Q entries of its chunk: its L, its weight, its token.
struct __align__(16) EntryRecord {
    long long fixed;
    float weight;
    unsigned packed;  // token (8 bits), erasures (12), NaNs (12)

    static __device__ __forceinline__ EntryRecord of(LogDecay l, float weight, int token) {
        return EntryRecord{l.fixed, weight, static_cast<unsigned>(token | l.erasures << 8 | l.nans << 20)};
    }
    __device__ __forceinline__ int token() const {
        return packed & 0xff;
    }
    __device__ __forceinline__ LogDecay log() const {
        return LogDecay{fixed, static_cast<int>(packed >> 8 & 0xfff), static_cast<int>(packed >> 20)};
    }
};

// Where the K entries that an entry meets lie in sorted order: those of its slot up to its own place, and its L.
struct __align__(16) Partners {
    long long fixed;
    unsigned first;  // 20 bits, then erasures (12)
    unsigned count;  // 20 bits, then NaNs (12)

    static __device__ __forceinline__ Partners of(LogDecay l, int first, int count) {
        return Partners{l.fixed, static_cast<unsigned>(first | l.erasures << 20),
                        static_cast<unsigned>(count | l.nans << 20)};
    }
    __device__ __forceinline__ int begin() const {
        return first & 0xfffff;
    }
    __device__ __forceinline__ int end() const {
        return begin() + static_cast<int>(count & 0xfffff);
    }
    __device__ __forceinline__ LogDecay log() const {
        return LogDecay{fixed, static_cast<int>(first >> 20), static_cast<int>(count >> 20)};
    }
};

// A K entry, in sorted order: what it adds to its row when the chunk is written, k_val exp(rex) delta[token], and what
// it takes of the row before, k_eff.
struct __align__(16) WriteTerm {
    float weight;  // k_val exp(rex)
    float k_eff;
    int code;  // lane and token, as in the payload
    int slot;  // its SlotRecord

    __device__ __forceinline__ int token() const {
        return entry_token(code);
    }
};

// A Q entry, in sorted order: what it reads, q_w M[slot], and the K entries of its slot up to its own place.
struct __align__(16) ReadTerm {
    float q_w;
    int code;
    int first_write, writes;  // K entries first_write .. first_write + writes in sorted order

    __device__ __forceinline__ int token() const {
        return entry_token(code);
    }
};

// A slot that the chunk writes: its K entries are first .. first + count in sorted order.
struct __align__(16) SlotRecord {
    int slot;
    int first;
    int count;
    float cpe;  // exp(tot)
};

// A slot that the chunk reads: its Q entries are first .. first + count in sorted order.
struct __align__(16) ReadSlot {
    int slot;
    int first;
    int count;
    int written;  // 1 where the chunk writes it too
};
