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

// Where `dtypes` says how an operand is stored: two bits (0 float, 1 Bf16, 2 Fp16) for values, one bit
// (64-bit) for integers.
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

static __device__ __forceinline__ float load_real(const void* base, long long i, int dtypes, DtypeBit bit) {
    const int dtype = (dtypes >> bit) & 3;
    if (dtype == 0) return ptx::load_readonly(static_cast<const float*>(base) + i);
    const unsigned short bits = ptx::load_readonly(static_cast<const unsigned short*>(base) + i);
    return dtype == 1 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
}

static __device__ __forceinline__ long long load_integer(const void* base, long long i, int dtypes,
                                                         DtypeBit bit) {
    if ((dtypes >> bit) & 1) return ptx::load_readonly(static_cast<const long long*>(base) + i);
    return ptx::load_readonly(static_cast<const int*>(base) + i);
}

// The slot of a bank row within its stream, -1 where it is absent.
static __device__ __forceinline__ int slot_of(long long row, long long first_row, int slots) {
    const long long slot = row - first_row;
    return slot >= 0 && slot < slots ? static_cast<int>(slot) : -1;
}

static __device__ __forceinline__ BankWord load_word(const BANK* p) {
    return ptx::load_global(reinterpret_cast<const BankWord*>(p));
}

// The sum over `Count` groups of one column; `partial` is the first group's element.
template <int Count>
static __device__ __forceinline__ float sum_groups(const float* partial, int columns) {
    if constexpr (Count == 1) {
        return *partial;
    } else {
        return sum_groups<Count / 2>(partial, columns) +
               sum_groups<Count / 2>(partial + Count / 2 * columns, columns);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
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

    int* k_slot = ptx::dynamic_shared<int>();                // [W4], -1 where absent
    float* k_value = reinterpret_cast<float*>(k_slot + W4);  // [W4]
    float* k_weight = k_value + W4;                          // [W4], the values of the slot's lanes added up
    float* k_decay = k_weight + W4;                          // [W4], -1 in lanes that write no row
    float* q_value = k_decay + W4;                           // [R4]
    int* q_written = reinterpret_cast<int*>(q_value + R4);   // [R4], whether this token writes the row
    float* partial = reinterpret_cast<float*>(q_written + R4);  // [GROUPS, columns]
    float* delta = partial + GROUPS * columns;                  // [columns]

    ptx::pdl_wait();
    ptx::pdl_trigger();

    const bool sums_column = thread < columns && slice + thread < D;
    const long long summed = p * D + slice + thread;  // the element of v and y of such a thread
    if (lengths != nullptr && load_integer(lengths, p, dtypes, LENGTHS_WIDE) <= 0) {
        if (sums_column) y[summed] = from_float<BANK>(0.0f);
        return;
    }

    // All rows of the block are under way before anything waits for one.
    BANK* const bank = memory + first_row * row_stride + slice + column;
    const bool inside = slice + column < D;
    int k_mine[K_ROWS], q_mine[Q_ROWS];  // slots of this thread's rows, -1 for none
    BankWord k_row[K_ROWS] = {}, q_row[Q_ROWS] = {};
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int n = group + i * GROUPS;
        k_mine[i] = -1;
        if (inside && n < W)
            k_mine[i] = slot_of(load_integer(k_idx, p * W + n, dtypes, K_IDX_WIDE), first_row, S);
    }
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        const int m = group + i * GROUPS;
        q_mine[i] = -1;
        if (inside && m < R)
            q_mine[i] = slot_of(load_integer(q_idx, p * R + m, dtypes, Q_IDX_WIDE), first_row, S);
    }
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i)
        if (k_mine[i] >= 0) k_row[i] = load_word(bank + k_mine[i] * row_stride);
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i)
        if (q_mine[i] >= 0) q_row[i] = load_word(bank + q_mine[i] * row_stride);

    const float strength = load_real(beta, p, dtypes, BETA_DTYPE);
    const float value = sums_column ? round_to<BANK>(load_real(v, summed, dtypes, V_DTYPE)) : 0.0f;
    for (int n = thread; n < W4; n += threads) {
        k_slot[n] = -1;
        if (n >= W) continue;
        k_slot[n] = slot_of(load_integer(k_idx, p * W + n, dtypes, K_IDX_WIDE), first_row, S);
        k_value[n] = round_to<BANK>(load_real(k_val, p * W + n, dtypes, K_VAL_DTYPE));
        k_decay[n] = exp_decay(load_real(g, gates == 1 ? p : p * W + n, dtypes, G_DTYPE));
    }
    for (int m = thread; m < R; m += threads)
        q_value[m] = round_to<BANK>(load_real(q_val, p * R + m, dtypes, Q_VAL_DTYPE));
    __syncthreads();

    // The first of a slot's write lanes writes for all of them. A read slot is written by this token or not.
    for (int lane = thread; lane < W + R; lane += threads) {
        const bool is_write = lane < W;
        const int slot =
            is_write ? k_slot[lane]
                     : slot_of(load_integer(q_idx, p * R + lane - W, dtypes, Q_IDX_WIDE), first_row, S);
        int first = W;
        float weight = 0.0f;
        for (int n = 0; n < W4; n += 4) {
            const int4 four = *reinterpret_cast<const int4*>(k_slot + n);
            const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (slot >= 0 && others[i] == slot) {
                    first = min(first, n + i);
                    if (is_write) weight += k_value[n + i];
                }
        }
        if (is_write) {
            k_weight[lane] = weight;
            if (first != lane) k_decay[lane] = -1.0f;
            if (slot >= 0 && first != lane && blockIdx.y == 0) atomicAdd(repeats, 1ull);
        } else {
            q_written[lane - W] = first < W;
        }
    }
    __syncthreads();

    float sum[VECTOR] = {}, row[VECTOR];
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int n = group + i * GROUPS;
        if (k_mine[i] >= 0 && k_decay[n] == -1.0f) k_mine[i] = -1;
        if (k_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(k_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(k_weight[n], k_decay[n] * row[c], sum[c]);
    }
    store_floats(partial + group * columns + column, sum);
    __syncthreads();
    if (thread < columns) delta[thread] = strength * (value - sum_groups<GROUPS>(partial + thread, columns));
    __syncthreads();

    float change[VECTOR];
    load_floats(delta + column, change);
#pragma unroll
    for (int i = 0; i < K_ROWS; ++i) {
        const int n = group + i * GROUPS;
        if (k_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(k_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) row[c] = fmaf(k_weight[n], change[c], k_decay[n] * row[c]);
        store_values(bank + k_mine[i] * row_stride, row);
    }
    __syncthreads();

    // Rows that this token wrote are loaded again: this block wrote the columns that it reads.
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i)
        if (q_mine[i] >= 0 && q_written[group + i * GROUPS])
            q_row[i] = load_word(bank + q_mine[i] * row_stride);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) sum[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < Q_ROWS; ++i) {
        if (q_mine[i] < 0) continue;
        unpack<BANK, VECTOR>(q_row[i], row);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(q_value[group + i * GROUPS], row[c], sum[c]);
    }
    store_floats(partial + group * columns + column, sum);
    __syncthreads();
    if (sums_column) y[summed] = from_float<BANK>(sum_groups<GROUPS>(partial + thread, columns));
}
