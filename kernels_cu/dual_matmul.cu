// The two triangular products of a step, and the readings.
//
//     u = strength residual      delta = X u      y = QX u + inter      err = residual - tril(A, -1) delta
//
// Padded tokens have strength, residual and inter 0; their readings are 0.
//
// Macros  BANK (float, Bf16, Fp16), COLUMNS (of a block, a multiple of 4), SAVE (1: err is written).
// Grid    (P streams, slices of COLUMNS columns).
// Block   THREADS = TILE * COLUMNS / 4 threads: TILE rows by groups of 4 columns.
// Reads   residual, inter [P, C, D]; x, qx, a [chunks, C, C] and strength [chunks, C] of the slab.
// Writes  delta [P, C, D]; readings [rows, D] (0 on padding); err [all chunks, C, D] (SAVE).
// Sums    over j upwards, j <= i (err: j < i): what lies above the diagonal is never read.
// Shared  dynamic, 4 * ((1 + SAVE) * C * COLUMNS + 2 * TILE * (TILE + 1) - 1) bytes.
#include "chunk.cuh"
#include "numeric.cuh"

#define TILE 32
#define THREADS (TILE * COLUMNS / 4)

// Copies the tile at (row, column) of a [C, C] matrix; beyond the matrix 0.
static __device__ __forceinline__ void load_tile(float* tile, const float* matrix, int row, int column, int C) {
    for (int cell = threadIdx.x; cell < TILE * TILE; cell += THREADS) {
        const int r = cell / TILE, c = cell % TILE;
        tile[r * (TILE + 1) + c] = row + r < C && column + c < C
            ? ptx::load_readonly(matrix + static_cast<long long>(row + r) * C + column + c)
            : 0.0f;
    }
}

static __device__ __forceinline__ void add_product(float4& sum, float factor, const float4& x) {
    sum.x = fmaf(factor, x.x, sum.x);
    sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z);
    sum.w = fmaf(factor, x.w, sum.w);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dual_matmul(const float* residual, const float* inter, const float* x, const float* qx, const float* a,
                const float* strength, const void* lengths, const void* cu_seqlens, float* delta, BANK* readings,
                float* err, int step, int slab_step, int P, int T, int C, int D, int wide) {
    float4* const u = ptx::dynamic_shared<float4>();                             // [C, COLUMNS / 4]
    float4* const change = u + SAVE * C * (COLUMNS / 4);                         // [C, COLUMNS / 4], delta (SAVE)
    float* const tile_x = reinterpret_cast<float*>(change + C * (COLUMNS / 4));  // [TILE, TILE + 1]
    float* const tile_qx = tile_x + TILE * (TILE + 1);                           // [TILE, TILE + 1]
    const int p = blockIdx.x, slice = blockIdx.y * COLUMNS;
    const int r = threadIdx.x / (COLUMNS / 4), group = threadIdx.x % (COLUMNS / 4);
    const long long n = static_cast<long long>(step - slab_step) * P + p;
    const long long rows = static_cast<long long>(p) * C;
    x += n * C * C, qx += n * C * C, a += n * C * C;
    strength += n * C;

    const Chunk chunk = chunk_at(static_cast<long long>(step) * P + p, P, T, C, lengths, cu_seqlens, wide);
    float* const u_cells = reinterpret_cast<float*>(u);
    for (int cell = threadIdx.x; cell < C * COLUMNS; cell += THREADS) {
        const int i = cell / COLUMNS, column = slice + cell % COLUMNS;
        u_cells[cell] = column < D ? strength[i] * residual[(rows + i) * D + column] : 0.0f;
    }
    __syncthreads();

    for (int first = 0; first < C; first += TILE) {
        const int i = first + r;
        float4 sum_x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum_qx = sum_x;
        for (int begin = 0; begin <= first; begin += TILE) {
            load_tile(tile_x, x, first, begin, C);
            load_tile(tile_qx, qx, first, begin, C);
            __syncthreads();
            const int end = begin == first ? r + 1 : TILE;
            if (i < C)
                for (int j = 0; j < end; ++j) {
                    const float4 value = u[(begin + j) * (COLUMNS / 4) + group];
                    add_product(sum_x, tile_x[r * (TILE + 1) + j], value);
                    add_product(sum_qx, tile_qx[r * (TILE + 1) + j], value);
                }
            __syncthreads();
        }
        if (i >= C) continue;
#if SAVE
        change[i * (COLUMNS / 4) + group] = sum_x;
#endif
        const float change_of[4] = {sum_x.x, sum_x.y, sum_x.z, sum_x.w};
        const float y_of[4] = {sum_qx.x, sum_qx.y, sum_qx.z, sum_qx.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = slice + group * 4 + c;
            if (column >= D) break;
            const long long at = (rows + i) * D + column;
            delta[at] = change_of[c];
            if (i < chunk.rows) {
                const float y = i < chunk.tokens ? y_of[c] + inter[at] : 0.0f;
                readings[(chunk.first_row + i) * D + column] = from_float<BANK>(y);
            }
        }
    }
    ptx::pdl_trigger();
#if SAVE
    __syncthreads();
    for (int first = 0; first < C; first += TILE) {
        const int i = first + r;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int begin = 0; begin <= first; begin += TILE) {
            load_tile(tile_x, a, first, begin, C);
            __syncthreads();
            const int end = begin == first ? r : TILE;
            if (i < C)
                for (int j = 0; j < end; ++j)
                    add_product(sum, tile_x[r * (TILE + 1) + j], change[(begin + j) * (COLUMNS / 4) + group]);
            __syncthreads();
        }
        if (i >= C) continue;
        const float sum_of[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = slice + group * 4 + c;
            if (column >= D) break;
            err[((static_cast<long long>(step) * P + p) * C + i) * D + column] =
                residual[(rows + i) * D + column] - sum_of[c];
        }
    }
#endif
}
