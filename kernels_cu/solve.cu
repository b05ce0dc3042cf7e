// The triangular solve of each chunk: X = (I + diag(beta) tril(A, -1))^-1 and QX = tril(QK) X, in IEEE float32.
//
//     X[i, c] = [i == c] - beta[i] sum over j < i of A[i, j] X[j, c]        QX[i, c] = sum over j <= i of QK[i, j] X[j, c]
//
// Columns of X are independent, so a block takes a panel of them and walks the rows down, TILE at a time. Its first warp
// solves, its second one multiplies by QK a step behind it. A thread holds the sums of TILE rows in two columns, and
// adds a row of X to all of them as soon as that row is known.
//
// Grid    (chunks, panels of PANEL columns).
// Block   64 threads: a warp for X, a warp for QX; a thread has columns 32 apart.
// Reads   a, qk [chunks, C, C] (what lies above the diagonal is ignored), strength [chunks, C], the beta of each token.
// Writes  x, qx [chunks, C, C], all of them (0 above the diagonal).
// Sums    over j upwards, from the first column of the panel or, right of its middle, of its second half: X is 0 before.
// Shared  dynamic, floats: two spans of A and two of QK, each [min(SPAN, N), STRIDE], column by column; then the panel
//         of X, [N, PANEL]. N is C rounded up to a multiple of TILE.
#include "ptx.cuh"

#define TILE 16            // rows at a time
#define PANEL 64           // columns of X a block
#define SPAN 32            // columns of A and QK that are staged at once
#define STRIDE (TILE + 4)  // of a staged column: whole 16-byte words, and 4 rows of 8 columns lie in 32 banks
#define ALL 0xffffffffu

// A step of a warp: TILE rows from `first`, up to SPAN columns from `from`, none beyond the rows' own tile.
struct Step {
    int first, from;
    __device__ __forceinline__ bool is_last_of_rows() const {
        return from + SPAN >= first + TILE;
    }
    __device__ __forceinline__ Step next(int begin) const {
        return is_last_of_rows() ? Step{first + TILE, begin} : Step{first, from + SPAN};
    }
};

// How many steps the rows from `begin` on take: each TILE of them one for every SPAN columns up to their diagonal.
static __device__ __forceinline__ int count_steps(int begin, int C) {
    const int tiles = (C - begin + TILE - 1) / TILE, whole = tiles / (SPAN / TILE), rest = tiles % (SPAN / TILE);
    return (whole + 1) * (SPAN / TILE * whole / 2 + rest);
}

// Begins to copy what a step reads of a [C, C] matrix, by column; 0 where the matrix has ended.
static __device__ __forceinline__ void stage(float* span, const float* matrix, const Step& step, int C) {
    const int lane = threadIdx.x % 32, i = step.first + lane / 8, j = step.from + lane % 8;
    const int columns = min(SPAN, step.first + TILE - step.from);
    const float* from = matrix + i * C + j;
    float* to = span + lane % 8 * STRIDE + lane / 8;
    if (step.first + TILE <= C) {
        for (int c = 0; c < columns; c += 16, from += 16, to += 16 * STRIDE)
#pragma unroll
            for (int r = 0; r < TILE; r += 4) {
                ptx::copy_async_4(to + r, from + r * C);
                ptx::copy_async_4(to + 8 * STRIDE + r, from + r * C + 8);
            }
    } else {
#pragma unroll 1
        for (int c = 0; c < columns; c += 8, from += 8, to += 8 * STRIDE)
#pragma unroll 1
            for (int r = 0; r < TILE; r += 4) {
                if (i + r < C && j + c < C)
                    ptx::copy_async_4(to + r, from + r * C);
                else
                    to[r] = 0.0f;
            }
    }
    ptx::copy_commit();
}

// A staged column from row `First` of the tile on.
template <int First>
static __device__ __forceinline__ void load_column(float (&column)[TILE], const float* staged) {
#pragma unroll
    for (int r = First / 4 * 4; r < TILE; r += 4) {
        const float4 four = *reinterpret_cast<const float4*>(staged + r);
        column[r] = four.x, column[r + 1] = four.y, column[r + 2] = four.z, column[r + 3] = four.w;
    }
}

// Adds a row of X, times a staged column, to the sums of the tile's rows from `First` on, in one column or in both.
template <int First, int Columns = 2>
static __device__ __forceinline__ void add_row(float (&sum)[TILE][2], const float* staged, const float (&x)[2]) {
    float column[TILE];
    load_column<First>(column, staged);
#pragma unroll
    for (int r = First; r < TILE; ++r)
#pragma unroll
        for (int c = 0; c < Columns; ++c) sum[r][c] = fmaf(column[r], x[c], sum[r][c]);
}

// The rows of a tile from `Row` on, each of which waits for the ones above it; their X takes the place of their sums.
template <int Row>
static __device__ __forceinline__ void solve_rows(float (&sum)[TILE][2], const float* staged,
                                                  const float (&strength)[TILE], int first, int column) {
    const int i = first + Row;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int at = column + 32 * c;
        sum[Row][c] = i < at ? 0.0f : (i == at ? 1.0f : 0.0f) - strength[Row] * sum[Row][c];
    }
    if constexpr (Row + 1 < TILE) {
        add_row<Row + 1>(sum, staged + Row * STRIDE, sum[Row]);
        solve_rows<Row + 1>(sum, staged, strength, first, column);
    }
}

// Adds the tile's own rows of X to the sums of its rows from each one on.
template <int Row>
static __device__ __forceinline__ void multiply_rows(float (&sum)[TILE][2], const float* staged, const float* rows) {
    const float x[2] = {rows[Row * PANEL], rows[Row * PANEL + 32]};
    add_row<Row>(sum, staged + Row * STRIDE, x);
    if constexpr (Row + 1 < TILE) multiply_rows<Row + 1>(sum, staged, rows);
}

extern "C" __global__ void __launch_bounds__(64, 8)
    solve(const float* a, const float* qk, const float* strength, float* x, float* qx, int C) {
    const bool multiplies = threadIdx.x >= 32;
    const int lane = threadIdx.x % 32, begin = blockIdx.y * PANEL, column = begin + lane;
    const int span_floats = min(SPAN, (C + TILE - 1) / TILE * TILE) * STRIDE;
    float* const spans = ptx::dynamic_shared<float>() + (multiplies ? 2 * span_floats : 0);
    float* const panel = ptx::dynamic_shared<float>() + 4 * span_floats + lane;  // row `begin` comes first
    const long long base = static_cast<long long>(blockIdx.x) * C * C;
    const float* const matrix = (multiplies ? qk : a) + base;
    float* const out = (multiplies ? qx : x) + base;
    strength += static_cast<long long>(blockIdx.x) * C;

    for (int i = 0; i < begin; ++i)
        for (int c = column; c < min(begin + PANEL, C); c += 32) out[i * C + c] = 0.0f;

    Step now{begin, begin};
    float sum[TILE][2];
    stage(spans, matrix, now, C);
    const int steps = count_steps(begin, C);
    for (int turn = 0; turn <= steps; ++turn) {
        __syncthreads();  // the multiplying warp takes the X of the step before
        if (turn == (multiplies ? 0 : steps)) continue;
        const int taken = multiplies ? turn - 1 : turn;
        const float* const span = spans + taken % 2 * span_floats;
        ptx::copy_wait<0>();
        __syncwarp();
        const Step next = now.next(begin);
        if (next.first < C) stage(spans + (taken + 1) % 2 * span_floats, matrix, next, C);

        if (now.from == begin) {
#pragma unroll
            for (int r = 0; r < TILE; ++r) sum[r][0] = sum[r][1] = 0.0f;
        }
        const int own = now.first + lane % TILE;
        const float beta = !multiplies && own < C ? ptx::load_readonly(strength + own) : 0.0f;
        const int end = min(now.from + SPAN, now.first), half = min(end, begin + 32);
        const auto staged = [&](int j) { return span + (j - now.from) * STRIDE; };
        const auto row_of_x = [&](int j) { return panel + (j - begin) * PANEL; };
        int j = now.from;
        for (; j < half; j += 8)  // the columns of the panel's other half are 0 here
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float of_row[2] = {row_of_x(j + k)[0], 0.0f};
                add_row<0, 1>(sum, staged(j + k), of_row);
            }
        for (; j < end; j += 8)
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float of_row[2] = {row_of_x(j + k)[0], row_of_x(j + k)[32]};
                add_row<0>(sum, staged(j + k), of_row);
            }
        if (now.is_last_of_rows()) {
            const float* const diagonal = staged(now.first);
            float* const rows = row_of_x(now.first);
            if (multiplies) {
                multiply_rows<0>(sum, diagonal, rows);
            } else {
                float strength_of[TILE];
#pragma unroll
                for (int r = 0; r < TILE; ++r) strength_of[r] = __shfl_sync(ALL, beta, r);
                solve_rows<0>(sum, diagonal, strength_of, now.first, column);
#pragma unroll
                for (int r = 0; r < TILE; ++r) rows[r * PANEL] = sum[r][0], rows[r * PANEL + 32] = sum[r][1];
            }
            float* to = out + now.first * C + column;
#pragma unroll
            for (int r = 0; r < TILE; ++r, to += C) {
                const int i = now.first + r;
                if (i < C && column < C) to[0] = column <= i ? sum[r][0] : 0.0f;
                if (i < C && column + 32 < C) to[32] = column + 32 <= i ? sum[r][1] : 0.0f;
            }
        }
        now = next;
    }
}
