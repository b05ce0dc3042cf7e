// One token of every stream: decay, delta-rule write and read of math.md's recurrence, in one launch.
//
// With the write slots s_n = k_idx[p, n] and the read slots q_idx[p, m] of the token of stream p:
//     M[s_n] <- exp(g_n) M[s_n]              r = sum_n k_n M[s_n]         delta = beta (v - r)
//     M[s_n] <- M[s_n] + k_n delta           y = sum_m q_m M[q_idx[m]]
// Rows of the bank are overwritten, rounded once; y is overwritten. A repeated write slot decays once, by the gate of
// its first lane, and its weights add in lane order. An index outside the stream's rows is absent. A stream of length
// 0 keeps its rows and reads 0.
//
// Macros  BANK (float, Bf16, Fp16); VECTOR (1, 4 or 8), bank values of one load; GROUPS (32); K_ROWS >= W / GROUPS and
//         Q_ROWS >= R / GROUPS, rows that a thread holds.
// Grid    (P, column slices of blockDim.x * VECTOR columns).
// Block   (1, 2, 4 or 8 threads across a row, GROUPS rows side by side): a warp holds 32 / blockDim.x groups.
// Reads   memory [P*S, D] (rows row_stride values apart), k_idx [P, W], k_val [P, W], v [P, D], beta [P],
//         g [P, W] or [P], q_idx [P, R], q_val [P, R], lengths [P] or null. `dtypes` says how each is stored.
// Writes  rows of memory, y [P, D]; adds to repeats[0] the write lanes that repeat a slot.
// Sums    over rows: each group its rows n = group, group + GROUPS, .. in turn, then neighbouring groups pairwise in a
//         tree, by shuffles within a warp and then over the warps: the same bits for every slice width and vector.
// Shared  dynamic, 4 * (4 * W4 + R4 + 4 + (1 + 2 * warps) * slice columns) bytes, W4 and R4 being W and R rounded up
//         to multiples of 4.
//
// Time goes by dependent loads, indices and then rows, and by instructions. So the rows are under way before anything
// else is looked at; one thread a lane converts what the others find in shared memory. A thread that reads a row which
// this token writes makes the new row from the old one by the writer's operations: nothing waits for a store.
#include "numeric.cuh"

static_assert(GROUPS == 32, "as many warps as threads across a row");

#define MAX_THREADS 256
// Blocks that an SM is to hold: what the registers allow without spilling rows.
#define RESIDENT_BLOCKS (K_ROWS + Q_ROWS <= 4 ? 4 : K_ROWS + Q_ROWS <= 8 ? 2 : 1)

// Where `dtypes` says how an operand is stored: two bits (0 float, 1 Bf16, 2 Fp16) for values, one bit (64-bit) for
// integers.
enum DtypeBit {
    K_VAL_DTYPE = 0,
    V_DTYPE = 2,
    BETA_DTYPE = 4,
    G_DTYPE = 6,
    Q_VAL_DTYPE = 8,
    K_IDX_WIDE = 10,
    Q_IDX_WIDE = 11,
    LENGTHS_WIDE = 12
};

// The elements of an operand from one of them on.
struct Operand {
    const char* first;
    int dtype;       // as `dtypes` says it
    unsigned bytes;  // of an element

    __device__ __forceinline__ const char* at(int i) const {
        return first + static_cast<unsigned long long>(static_cast<unsigned>(i)) * bytes;
    }
};
static __device__ __forceinline__ Operand integers(const void* base, long long i, int dtypes, DtypeBit bit) {
    const int wide = dtypes >> bit & 1;
    const unsigned bytes = wide ? 8 : 4;
    const char* first = static_cast<const char*>(base) + i * bytes;
    ptx::renew(first);  // so that an address is one instruction from here
    return {first, wide, bytes};
}
static __device__ __forceinline__ Operand reals(const void* base, long long i, int dtypes, DtypeBit bit) {
    const int dtype = dtypes >> bit & 3;
    const unsigned bytes = dtype == 0 ? 4 : 2;
    return {static_cast<const char*>(base) + i * bytes, dtype, bytes};
}

// An operand's element as it lies in memory: loaded at once, converted when it is needed. The high half, of 64-bit
// integers and of floats only, is a load of its own: of two loads into one register the later waits for the earlier.
struct Raw {
    unsigned low, high;
};
static __device__ __forceinline__ Raw load_integer(const Operand& x, int i) {
    const unsigned* const at = reinterpret_cast<const unsigned*>(x.at(i));
    return {ptx::load_readonly(at), x.dtype ? ptx::load_readonly(at + 1) : 0u};
}
static __device__ __forceinline__ long long integer(const Operand& x, Raw raw) {
    const unsigned sign = static_cast<int>(raw.low) >> 31;
    return static_cast<long long>(static_cast<unsigned long long>(x.dtype ? raw.high : sign) << 32 | raw.low);
}
static __device__ __forceinline__ Raw load_real(const Operand& x, int i) {
    const unsigned short* const at = reinterpret_cast<const unsigned short*>(x.at(i));
    return {ptx::load_readonly_extended(at), x.dtype == 0 ? ptx::load_readonly_extended(at + 1) : 0u};
}
static __device__ __forceinline__ float real(const Operand& x, Raw raw) {
    const float fp16 = to_float(Fp16{static_cast<unsigned short>(raw.low)});
    const unsigned bits = raw.low << (x.dtype == 0 ? 0 : 16) | raw.high << 16;  // a float, or a Bf16 as one
    return x.dtype == 2 ? fp16 : __uint_as_float(bits);
}

using BankWord = Word<BANK, VECTOR>;

// The lines of an operand's `count` elements on their way into L2, a thread for each.
static __device__ __forceinline__ void hint(const Operand& x, int count, int thread) {
    const unsigned byte = 128u * static_cast<unsigned>(thread);
    ptx::prefetch_l2_if(byte < static_cast<unsigned>(count) * x.bytes, x.first + byte);
}

// What is written to a slot: by its first lane, with the weights of all its lanes added.
struct Write {
    int first;
    float weight;
};
static __device__ __forceinline__ Write write_to(int slot, const int* slots, const float* weights, int W) {
    Write write = {-1, 0.0f};
#pragma unroll 1
    for (int n = 0; n < W; ++n) {
        if (slots[n] != slot) continue;
        write.weight = write.first < 0 ? weights[n] : write.weight + weights[n];
        if (write.first < 0) write.first = n;
    }
    return write;
}

// The first lane of a slot, W4 where there is none: the `across` threads of a row share the lanes out.
static __device__ __forceinline__ int first_lane(int slot, const int* slots, int W4, int across) {
    int first = W4;
#pragma unroll 1
    for (int n = 4 * threadIdx.x; n < W4; n += 4 * across) {
        const int4 four = *reinterpret_cast<const int4*>(slots + n);
        const int here = four.x == slot ? 0 : four.y == slot ? 1 : four.z == slot ? 2 : four.w == slot ? 3 : W4;
        first = min(first, n + here);
    }
#pragma unroll 1
    for (int distance = 1; distance < across; distance *= 2)
        first = min(first, __shfl_xor_sync(0xffffffffu, first, distance));
    return min(first, W4);
}

// ---- sums over the groups ----

// Of the VECTOR columns of its rows, a thread adds up KEPT over all groups; HOLDERS neighbouring groups share them out.
constexpr int HOLDERS = VECTOR < 4 ? 1 : 4;
constexpr int KEPT = VECTOR / HOLDERS;
using KeptWord = Word<float, KEPT>;

// Adds the sums of two groups, `distance` lanes apart: each keeps half of `Count` columns, the odd one the upper half.
template <int Count>
static __device__ __forceinline__ void share_out(float (&sum)[VECTOR], bool odd, int distance) {
#pragma unroll
    for (int c = 0; c < Count / 2; ++c) {
        const float given = odd ? sum[c] : sum[c + Count / 2];
        const float kept = odd ? sum[c + Count / 2] : sum[c];
        sum[c] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
    }
}

// The sums of this thread's kept columns over the groups of its warp.
static __device__ __forceinline__ KeptWord sum_warp(float (&sum)[VECTOR]) {
    const int across = static_cast<int>(blockDim.x);
    if constexpr (HOLDERS == 4) {
        share_out<VECTOR>(sum, threadIdx.y & 1, across);
        share_out<VECTOR / 2>(sum, threadIdx.y & 2, 2 * across);
    }
    float kept[KEPT];
#pragma unroll
    for (int c = 0; c < KEPT; ++c) kept[c] = sum[c];
#pragma unroll 1
    for (int distance = HOLDERS * across; distance < 32; distance *= 2) {
#pragma unroll
        for (int c = 0; c < KEPT; ++c) kept[c] += __shfl_xor_sync(0xffffffffu, kept[c], distance);
    }
    return pack<float, KEPT>(kept);
}

// The sums of the kept columns over `Count` neighbouring warps of the block's `Warps`, as a tree: partial [Warps, slice
// columns].
template <int Warps, int Count = Warps>
static __device__ __forceinline__ void add_warps(const float* partial, float (&sum)[KEPT]) {
    if constexpr (Count == 1) {
        unpack<float, KEPT>(*reinterpret_cast<const KeptWord*>(partial), sum);
    } else {
        float other[KEPT];
        add_warps<Warps, Count / 2>(partial, sum);
        add_warps<Warps, Count / 2>(partial + Count / 2 * Warps * VECTOR, other);
#pragma unroll
        for (int c = 0; c < KEPT; ++c) sum[c] += other[c];
    }
}
// The sums over the warps of the block, from this thread's first kept column on.
static __device__ __forceinline__ void sum_block(const float* partial, float (&sum)[KEPT]) {
    switch (blockDim.x) {
        case 1:
            return add_warps<1>(partial, sum);
        case 2:
            return add_warps<2>(partial, sum);
        case 4:
            return add_warps<4>(partial, sum);
        default:
            return add_warps<8>(partial, sum);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, RESIDENT_BLOCKS)
    decode(BANK* memory, const void* k_idx, const void* k_val, const void* v, const void* beta, const void* g,
           const void* q_idx, const void* q_val, const void* lengths, BANK* y, unsigned long long* repeats,
           long long row_stride, int S, int D, int W, int R, int gates, int dtypes) {
    const int across = blockDim.x;
    const int group = threadIdx.y;
    const int thread = group * across + threadIdx.x;
    const int threads = across * GROUPS;
    const int columns = across * VECTOR;
    const int column = threadIdx.x * VECTOR;  // within the slice
    const int slice = blockIdx.y * columns;
    const long long p = blockIdx.x;
    const long long first_row = p * S;
    const int W4 = (W + 3) & ~3;
    const int R4 = (R + 3) & ~3;

    // The first of the kept columns, and whether this thread is the one of its warp that hands their sums on.
    const int kept = HOLDERS == 4 ? column + (group & 1) * (VECTOR / 2) + (group >> 1 & 1) * (VECTOR / 4) : column;
    const bool holds = thread % 32 < HOLDERS * across;

    int* const slots = ptx::dynamic_shared<int>();                   // [W4], of the write lanes, -1 where absent
    float* const weights = reinterpret_cast<float*>(slots + W4);     // [W4]
    float2* const writes = reinterpret_cast<float2*>(weights + W4);  // [W4], weight of all the slot's lanes, decay
    float* const q_weights = reinterpret_cast<float*>(writes + W4);  // [R4]
    float* const strength = q_weights + R4;                          // [4], beta and padding
    float* const values = strength + 4;                              // [columns], v
    float* const k_sums = values + columns;                          // [warps, columns]
    float* const q_sums = k_sums + threads / 32 * columns;           // [warps, columns]

    const Operand k_index = integers(k_idx, p * W, dtypes, K_IDX_WIDE);
    const Operand q_index = integers(q_idx, p * R, dtypes, Q_IDX_WIDE);
    const Operand k_value = reals(k_val, p * W, dtypes, K_VAL_DTYPE);
    const Operand q_value = reals(q_val, p * R, dtypes, Q_VAL_DTYPE);
    const Operand gate = reals(g, p * gates, dtypes, G_DTYPE);
    const Operand value = reals(v, p * D, dtypes, V_DTYPE);
    const Operand beta_value = reals(beta, p, dtypes, BETA_DTYPE);
    // The lane of row i of this thread.
    const auto lane_of = [&](int i) { return group + i * GROUPS; };

    // The operands of the stream on their way into L2, by its block that starts first.
    if (blockIdx.y == 0) {
        hint(k_index, W, thread);
        hint(q_index, R, thread);
        hint(k_value, W, thread);
        hint(q_value, R, thread);
        hint(gate, gates, thread);
        hint(value, D, thread);
        hint(beta_value, 1, thread);
    }

    ptx::pdl_wait();
    ptx::pdl_trigger();

    // First stage of loads. Threads beyond an end load the last element.
    Raw k_row[K_ROWS], q_row[Q_ROWS];
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) k_row[i] = load_integer(k_index, min(lane_of(i), W - 1));
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) q_row[i] = load_integer(q_index, min(lane_of(i), R - 1));
    struct RawLane {
        Raw k_value, gate, q_value, value, strength;
    };
    const int lanes = max(max(W, R), columns);
    const auto load_lane = [&](int lane) -> RawLane {
        return {load_real(k_value, min(lane, W - 1)), load_real(gate, min(lane, gates - 1)),
                load_real(q_value, min(lane, R - 1)), load_real(value, min(slice + lane, D - 1)),
                load_real(beta_value, 0)};
    };
    RawLane raw_lane = {};
    if (thread < lanes) raw_lane = load_lane(thread);

    if (lengths != nullptr) {
        const Operand length = integers(lengths, p, dtypes, LENGTHS_WIDE);
        if (integer(length, load_integer(length, 0)) <= 0) {
            for (int c = slice + thread; c < min(slice + columns, D); c += threads)
                y[p * D + c] = from_float<BANK>(0.0f);
            return;
        }
    }

    // Second stage: all rows of the block.
    const unsigned long long row_bytes = row_stride * sizeof(BANK);
    char* const bank = reinterpret_cast<char*>(memory + first_row * row_stride + slice + column);
    const auto row_at = [&](unsigned slot) { return reinterpret_cast<BankWord*>(bank + slot * row_bytes); };
    const bool inside = slice + column < D;
    int k_slot[K_ROWS], q_slot[Q_ROWS];  // -1 for none
    BankWord k_word[K_ROWS] = {}, q_word[Q_ROWS] = {};
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const unsigned long long slot = integer(k_index, k_row[i]) - first_row;
        k_slot[i] = slot < static_cast<unsigned>(S) && lane_of(i) < W ? static_cast<int>(slot) : -1;
        ptx::load_global_if(inside && k_slot[i] >= 0, row_at(slot), k_word[i]);
    }
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        const unsigned long long slot = integer(q_index, q_row[i]) - first_row;
        q_slot[i] = slot < static_cast<unsigned>(S) && lane_of(i) < R ? static_cast<int>(slot) : -1;
        ptx::load_global_if(inside && q_slot[i] >= 0, row_at(slot), q_word[i]);
    }

    // Meanwhile: slots, and what is given by lane or by column, into shared memory.
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i)
        if (threadIdx.x == 0 && lane_of(i) < W4) slots[lane_of(i)] = k_slot[i];
    const auto store_lane = [&](int lane, const RawLane& raw) {
        if (lane < W) {
            weights[lane] = round_to<BANK>(real(k_value, raw.k_value));
            writes[lane] = {weights[lane], exp_decay(real(gate, raw.gate))};
        }
        if (lane < R) q_weights[lane] = round_to<BANK>(real(q_value, raw.q_value));
        if (lane < columns) values[lane] = round_to<BANK>(real(value, raw.value));
        if (lane == 0) *strength = real(beta_value, raw.strength);
    };
    if (thread < lanes) store_lane(thread, raw_lane);
    // The lanes beyond the threads: by turns where rows are loaded value by value, since on the loop NVRTC 12.9 crashes there
    // for sm_120; where they are not, the loop is faster.
    if constexpr (VECTOR == 1) {
        constexpr int TURNS = K_ROWS > Q_ROWS ? K_ROWS : Q_ROWS;
#pragma unroll 1
        for (int turn = 1; turn < TURNS; ++turn) {
            const int lane = thread + turn * threads;
            if (lane < lanes) store_lane(lane, load_lane(lane));
        }
    } else if constexpr (K_ROWS > 1 || Q_ROWS > 1) {  // else there are no more lanes than threads
#pragma unroll 1
        for (int lane = thread + threads; lane < lanes; lane += threads) store_lane(lane, load_lane(lane));
    }
    __syncthreads();

    // Which slots the write lanes name again, and which read slots they name: the threads of a row share the lanes out.
    int k_named[K_ROWS];
    bool q_named[Q_ROWS] = {};
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i)
        k_named[i] = (lane_of(i) / 4 & (across - 1)) == threadIdx.x ? -1 : 0;  // not by itself
#pragma unroll 1
    for (int n = 4 * threadIdx.x; n < W4; n += 4 * across) {
        const int4 four = *reinterpret_cast<const int4*>(slots + n);
#pragma unroll
        for (int i = 0; i < K_ROWS; ++i)
            k_named[i] += (four.x == k_slot[i]) + (four.y == k_slot[i]) + (four.z == k_slot[i]) + (four.w == k_slot[i]);
#pragma unroll
        for (int i = 0; i < Q_ROWS; ++i)
            q_named[i] |= four.x == q_slot[i] | four.y == q_slot[i] | four.z == q_slot[i] | four.w == q_slot[i];
    }
    const unsigned row_lanes = ((1u << across) - 1) << (thread % 32 - threadIdx.x);
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const bool repeated = __ballot_sync(0xffffffffu, k_named[i] > 0) & row_lanes;
        if (!repeated || k_slot[i] < 0) continue;
        const Write write = write_to(k_slot[i], slots, weights, W);
        const bool first = write.first == lane_of(i);
        if (!first) k_slot[i] = -1;
        if (threadIdx.x != 0) continue;
        if (first) writes[lane_of(i)].x = write.weight;
        if (!first && blockIdx.y == 0) atomicAdd(repeats, 1ull);
    }
    int q_writer[Q_ROWS];  // the first lane that writes the row, W4 for none
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        q_writer[i] = W4;
        if (__ballot_sync(0xffffffffu, q_named[i] && q_slot[i] >= 0))
            q_writer[i] = first_lane(q_slot[i], slots, W4, across);
    }

    // r, then delta: every warp finds delta of all columns of the slice, each thread of its kept ones.
    float sum[VECTOR] = {}, row[VECTOR];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        if (!inside || k_slot[i] < 0) continue;
        const float2 write = writes[lane_of(i)];
        unpack_pairs<BANK, VECTOR>(k_word[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(write.x, write.y * row[c], sum[c]);
    }
    const KeptWord k_sum = sum_warp(sum);
    if (holds) *reinterpret_cast<KeptWord*>(k_sums + thread / 32 * columns + kept) = k_sum;
    __syncthreads();
    float delta[VECTOR], kept_delta[KEPT], kept_value[KEPT];
    sum_block(k_sums + kept, kept_delta);
    unpack<float, KEPT>(*reinterpret_cast<const KeptWord*>(values + kept), kept_value);
#pragma unroll
    for (int c = 0; c < KEPT; ++c) kept_delta[c] = *strength * (kept_value[c] - kept_delta[c]);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) {
        const int holder = c / KEPT;  // halves by the first bit of the group, quarters by the second
        const int of_group = holder / 2 + holder % 2 * 2;
        delta[c] = __shfl_sync(0xffffffffu, kept_delta[c % KEPT], threadIdx.x + of_group * across);
    }

    const auto written = [&](const BankWord& word, int writer) {
        const float2 write = writes[writer];
        unpack_pairs<BANK, VECTOR>(word, row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) row[c] = fmaf(write.x, delta[c], write.y * row[c]);
        return pack<BANK, VECTOR>(row);
    };
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i)
        if (inside && k_slot[i] >= 0) ptx::store_global(row_at(k_slot[i]), written(k_word[i], lane_of(i)));

    // y.
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) sum[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        if (!inside || q_slot[i] < 0) continue;
        if (q_writer[i] < W4) q_word[i] = written(q_word[i], q_writer[i]);
        const float weight = q_weights[lane_of(i)];
        unpack_pairs<BANK, VECTOR>(q_word[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(weight, row[c], sum[c]);
    }
    const KeptWord q_sum = sum_warp(sum);
    if (holds) *reinterpret_cast<KeptWord*>(q_sums + thread / 32 * columns + kept) = q_sum;
    __syncthreads();
    if (thread >= 32 || !holds) return;
    float reading[KEPT];
    sum_block(q_sums + kept, reading);
#pragma unroll
    for (int c = 0; c < KEPT; ++c)
        if (slice + kept + c < D) y[p * D + slice + kept + c] = from_float<BANK>(reading[c]);
}
