// One token of every stream: decay, delta-rule write and read of math.md's recurrence, in one launch.
//
// With the write slots s_n = k_idx[p, n] and the read slots q_idx[p, m] of the token of stream p:
//     M[s_n] <- exp(g_n) M[s_n]              r = sum_n k_n M[s_n]         delta = beta (v - r)
//     M[s_n] <- M[s_n] + k_n delta           y = sum_m q_m M[q_idx[m]]
// Rows of the bank are overwritten, rounded once; y is overwritten. A repeated write slot decays once, by the
// gate of its first lane, and its weights add in lane order. An index outside the stream's rows is absent. A
// stream of length 0 keeps its rows and reads 0.
//
// Macros  BANK (float, Bf16, Fp16); VECTOR, bank values of one load; GROUPS, a power of two; K_ROWS >= W /
// GROUPS
//         and Q_ROWS >= R / GROUPS, rows that a thread holds.
// Grid    (P, column slices of blockDim.x * VECTOR columns).
// Block   (threads across a row, GROUPS rows side by side), at most MAX_THREADS threads.
// Reads   memory [P*S, D] (rows row_stride values apart), k_idx [P, W], k_val [P, W], v [P, D], beta [P],
//         g [P, W] or [P], q_idx [P, R], q_val [P, R], lengths [P] or null. `dtypes` says how each is stored.
// Writes  rows of memory, y [P, D]; adds to repeats[0] the write lanes that repeat a slot.
// Sums    over rows: each group its rows n = group, group + GROUPS, .. in turn, then neighbouring groups
// pairwise in a
//         tree: the same bits for every slice width and vector.
// Shared  dynamic, 4 * (4 * W4 + 2 * R4 + (GROUPS + 1) * slice columns) bytes, W4 and R4 being W and R
// rounded up to
//         multiples of 4.
#include "numeric.cuh"

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

using BankWord = Word<BANK, VECTOR>;

// An operand's element as it lies in memory: loaded at once, converted when it is needed.
struct RawInteger {
    unsigned low, high;  // high of a 64-bit integer only
};

static __device__ __forceinline__ RawInteger load_integer(const void* base, long long i, int dtypes, DtypeBit bit) {
    if (!(dtypes >> bit & 1)) return {ptx::load_readonly(static_cast<const unsigned*>(base) + i), 0u};
    const uint2 both = ptx::load_readonly(static_cast<const uint2*>(base) + i);
    return {both.x, both.y};
}
static __device__ __forceinline__ long long integer(RawInteger raw, int dtypes, DtypeBit bit) {
    if (!(dtypes >> bit & 1)) return static_cast<int>(raw.low);
    return static_cast<long long>(static_cast<unsigned long long>(raw.high) << 32 | raw.low);
}

// What the lanes `lane` of the writes and of the reads are given.
struct RawLane {
    RawInteger k_index, q_index;
    unsigned k_value, gate, q_value;
};

static __device__ __forceinline__ unsigned load_real(const void* base, long long i, int dtypes, DtypeBit bit) {
    if ((dtypes >> bit & 3) == 0) return ptx::load_readonly(static_cast<const unsigned*>(base) + i);
    return ptx::load_readonly_extended(static_cast<const unsigned short*>(base) + i);
}
static __device__ __forceinline__ float real(unsigned raw, int dtypes, DtypeBit bit) {
    const unsigned short half = static_cast<unsigned short>(raw);
    const int dtype = dtypes >> bit & 3;
    return dtype == 0 ? __uint_as_float(raw) : dtype == 1 ? to_float(Bf16{half}) : to_float(Fp16{half});
}

// The slot of a bank row within its stream, -1 where it is absent.
static __device__ __forceinline__ int slot_of(long long row, long long first_row, int slots) {
    const long long slot = row - first_row;
    return slot >= 0 && slot < slots ? static_cast<int>(slot) : -1;
}

static __device__ __forceinline__ void load_word_if(bool needed, const BANK* p, BankWord& word) {
    ptx::load_global_if(needed, reinterpret_cast<const BankWord*>(p), word);
}

// The sum over `Count` neighbouring groups of one column, as a tree.
template <int Count>
static __device__ __forceinline__ float sum_groups(const float* partial) {
    if constexpr (Count == 1) {
        return *partial;
    } else {
        return sum_groups<Count / 2>(partial) + sum_groups<Count / 2>(partial + Count / 2);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, RESIDENT_BLOCKS)
    decode(BANK* memory, const void* k_idx, const void* k_val, const void* v, const void* beta, const void* g,
           const void* q_idx, const void* q_val, const void* lengths, BANK* y, unsigned long long* repeats,
           long long row_stride, int S, int D, int W, int R, int gates, int dtypes) {
    const int group = threadIdx.y;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * GROUPS;
    const int columns = blockDim.x * VECTOR;
    const int column = threadIdx.x * VECTOR;  // within the slice
    const int slice = blockIdx.y * columns;
    const long long p = blockIdx.x;
    const long long first_row = p * S;
    const int W4 = (W + 3) & ~3;
    const int R4 = (R + 3) & ~3;

    int* const k_slot = ptx::dynamic_shared<int>();                // [W4], -1 where absent
    float* const k_value = reinterpret_cast<float*>(k_slot + W4);  // [W4]; of a slot's first lane: all its lanes' added
    float* const k_decay = k_value + W4;                           // [W4], -1 in lanes that write no row
    float* const q_value = k_decay + W4;                           // [R4]
    int* const q_written = reinterpret_cast<int*>(q_value + R4);   // [R4], the slot, then whether this token writes it
    float* const sums = reinterpret_cast<float*>(q_written + R4);  // [columns, GROUPS + 1], last: delta of the column
    float* const my_sums = sums + column * (GROUPS + 1);

    ptx::pdl_wait();
    ptx::pdl_trigger();

    // First stage of loads. Threads beyond an end load the last element.
    RawInteger k_row_index[K_ROWS], q_row_index[Q_ROWS];
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i)
        k_row_index[i] = load_integer(k_idx, p * W + min(group + i * GROUPS, W - 1), dtypes, K_IDX_WIDE);
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i)
        q_row_index[i] = load_integer(q_idx, p * R + min(group + i * GROUPS, R - 1), dtypes, Q_IDX_WIDE);

    const auto load_lane = [&](int lane) -> RawLane {
        const long long n = p * W + min(lane, W - 1), m = p * R + min(lane, R - 1);
        return {load_integer(k_idx, n, dtypes, K_IDX_WIDE), load_integer(q_idx, m, dtypes, Q_IDX_WIDE),
                load_real(k_val, n, dtypes, K_VAL_DTYPE), load_real(g, gates == 1 ? p : n, dtypes, G_DTYPE),
                load_real(q_val, m, dtypes, Q_VAL_DTYPE)};
    };
    const RawLane first_lane = load_lane(thread);
    const RawInteger length = load_integer(lengths != nullptr ? lengths : k_idx, p, dtypes, LENGTHS_WIDE);

    const bool sums_column = thread < columns && slice + thread < D;
    const long long summed = p * D + (sums_column ? slice + thread : 0);  // the element of v and y of such a thread
    if (lengths != nullptr && integer(length, dtypes, LENGTHS_WIDE) <= 0) {
        if (sums_column) y[summed] = from_float<BANK>(0.0f);
        return;
    }

    // Second stage: all rows of the block.
    BANK* const bank = memory + first_row * row_stride + slice + column;
    const bool inside = slice + column < D;
    int k_mine[K_ROWS], q_mine[Q_ROWS];  // slots of this thread's rows, -1 for none
    BankWord k_row[K_ROWS] = {}, q_row[Q_ROWS] = {};
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int slot = slot_of(integer(k_row_index[i], dtypes, K_IDX_WIDE), first_row, S);
        k_mine[i] = inside && group + i * GROUPS < W ? slot : -1;
        load_word_if(k_mine[i] >= 0, bank + k_mine[i] * row_stride, k_row[i]);
    }
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        const int slot = slot_of(integer(q_row_index[i], dtypes, Q_IDX_WIDE), first_row, S);
        q_mine[i] = inside && group + i * GROUPS < R ? slot : -1;
        load_word_if(q_mine[i] >= 0, bank + q_mine[i] * row_stride, q_row[i]);
    }

    const unsigned raw_v = load_real(v, summed, dtypes, V_DTYPE);
    const unsigned raw_beta = load_real(beta, p, dtypes, BETA_DTYPE);

    // Meanwhile: slots, weights and gates of all lanes into shared memory.
    const auto store_lane = [&](int lane, const RawLane& raw) {
        // Lanes W..W4 repeat the slot of lane W - 1, whose owner is below W all the same.
        if (lane < W4) k_slot[lane] = slot_of(integer(raw.k_index, dtypes, K_IDX_WIDE), first_row, S);
        if (lane < W) {
            k_value[lane] = round_to<BANK>(real(raw.k_value, dtypes, K_VAL_DTYPE));
            k_decay[lane] = real(raw.gate, dtypes, G_DTYPE);
        }
        if (lane < R) {
            q_written[lane] = slot_of(integer(raw.q_index, dtypes, Q_IDX_WIDE), first_row, S);
            q_value[lane] = round_to<BANK>(real(raw.q_value, dtypes, Q_VAL_DTYPE));
        }
    };
    store_lane(thread, first_lane);
    for (int lane = thread + threads; lane < max(W4, R4); lane += threads) store_lane(lane, load_lane(lane));
    __syncthreads();

    // The first of a slot's write lanes writes for all of them. A read slot is written by this token or not.
    bool repeated = false;
    for (int lane = thread; lane < W + R; lane += threads) {
        const bool writes = lane < W;
        const int slot = writes ? k_slot[lane] : q_written[lane - W];
        const int wanted = slot >= 0 ? slot : -2;  // an absent slot equals none
        int first[4] = {W, W, W, W};               // of the lanes 4 n + i
#pragma unroll 4
        for (int n = W4 - 4; n >= 0; n -= 4) {
            const int4 four = *reinterpret_cast<const int4*>(k_slot + n);
            if (four.x == wanted) first[0] = n;
            if (four.y == wanted) first[1] = n + 1;
            if (four.z == wanted) first[2] = n + 2;
            if (four.w == wanted) first[3] = n + 3;
        }
        const int owner = min(min(first[0], first[1]), min(first[2], first[3]));
        if (writes) {
            const bool repeats_slot = slot >= 0 && owner != lane;
            k_decay[lane] = owner == lane ? exp_decay(k_decay[lane]) : -1.0f;
            if (repeats_slot && blockIdx.y == 0) atomicAdd(repeats, 1ull);
            repeated |= repeats_slot;
        } else {
            q_written[lane - W] = owner < W;
        }
    }
    if (__syncthreads_or(repeated)) {
        for (int lane = thread; lane < W; lane += threads) {
            if (k_decay[lane] == -1.0f) continue;
            float weight = 0.0f;
            for (int n = 0; n < W; ++n)
                if (k_slot[n] == k_slot[lane]) weight += k_value[n];
            k_value[lane] = weight;
        }
        __syncthreads();
    }

    float sum[VECTOR] = {}, row[VECTOR];
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int n = group + i * GROUPS;
        if (k_mine[i] >= 0 && k_decay[n] == -1.0f) k_mine[i] = -1;
        if (k_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(k_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(k_value[n], k_decay[n] * row[c], sum[c]);
    }
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) my_sums[c * (GROUPS + 1) + group] = sum[c];
    __syncthreads();
    if (thread < columns) {
        float* const of_column = sums + thread * (GROUPS + 1);
        const float value = round_to<BANK>(real(raw_v, dtypes, V_DTYPE));
        of_column[GROUPS] = real(raw_beta, dtypes, BETA_DTYPE) * (value - sum_groups<GROUPS>(of_column));
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int n = group + i * GROUPS;
        if (k_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(k_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c)
            row[c] = fmaf(k_value[n], my_sums[c * (GROUPS + 1) + GROUPS], k_decay[n] * row[c]);
        store_values(bank + k_mine[i] * row_stride, row);
    }
    __syncthreads();

    // Rows that this token wrote are loaded again: this block wrote the columns that it reads.
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        const bool again = q_mine[i] >= 0 && q_written[min(group + i * GROUPS, R - 1)];
        load_word_if(again, bank + q_mine[i] * row_stride, q_row[i]);
    }
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) sum[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        if (q_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(q_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(q_value[group + i * GROUPS], row[c], sum[c]);
    }
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) my_sums[c * (GROUPS + 1) + group] = sum[c];
    __syncthreads();
    if (sums_column) y[summed] = from_float<BANK>(sum_groups<GROUPS>(sums + thread * (GROUPS + 1)));
}
