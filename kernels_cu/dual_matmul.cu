// The two triangular products of a step, and the readings.
//
//     u = strength residual      delta = X u      y = QX u + inter      err = residual - tril(A, -1) delta
//
// Padded tokens have strength, residual and inter 0; their readings are 0.
//
// Macros  BANK (float, Bf16, Fp16), COLUMNS (of a block, a multiple of 4), SAVE (1: err is written).
// Grid    (P streams, slices of COLUMNS columns).
// Block   THREADS = TILE / 2 * COLUMNS / WIDTH threads: pairs of rows by groups of WIDTH columns.
// Reads   residual, inter [P, C, D]; x, qx, a [chunks, C, C] and strength [chunks, C] of the slab; lengths, cu_seqlens
//         (chunk.cuh).
// Writes  delta [P, C, D]; readings [rows, D] (0 on padding); err [all chunks, C, D] (SAVE).
// Sums    over j upwards, j <= i (err: j < i): what lies above the diagonal is never added.
// Shared  dynamic, with C4 = C rounded up to 4 and side = min(TILE, C4): C4 + (1 + SAVE) C COLUMNS floats, then
//         2 + SAVE tiles of side * (side + 4) floats less the last 4.
#include "chunk.cuh"
#include "numeric.cuh"
#include "tiles.cuh"

#define TILE 64
#define WIDTH (COLUMNS > 32 ? 4 : 2)  // columns of a thread
#define GROUPS (COLUMNS / WIDTH)
#define THREADS (TILE / 2 * GROUPS)
#define BATCH 8

using Part = Columns<WIDTH>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dual_matmul(const float* residual, const float* inter, const float* x, const float* qx, const float* a,
                const float* strength, const void* lengths, const void* cu_seqlens, float* delta, BANK* readings,
                float* err, int step, int slab_step, int P, int T, int C, int D, int wide) {
    const int side = min(TILE, (C + 3) & ~3);
    float* const weight = ptx::dynamic_shared<float>();                   // [C4], strength
    Part* const held = reinterpret_cast<Part*>(weight + ((C + 3) & ~3));  // [C, GROUPS], residual
    Part* const change = held + SAVE * C * GROUPS;                        // [C, GROUPS], delta (SAVE)
    float* const tile_x = reinterpret_cast<float*>(change + C * GROUPS);  // [side, side + 4]
    float* const tile_qx = tile_x + side * (side + 4);
    float* const tile_a = tile_qx + side * (side + 4);  // (SAVE)
    const int p = blockIdx.x, slice = blockIdx.y * COLUMNS;
    const int row = threadIdx.x / GROUPS * 2, group = threadIdx.x % GROUPS;
    const long long n = static_cast<long long>(step - slab_step) * P + p;
    const long long rows = static_cast<long long>(p) * C;
    x += n * C * C, qx += n * C * C, a += n * C * C;
    strength += n * C;

    const Chunk chunk = chunk_of(step, p, T, C, lengths, cu_seqlens, wide);
    load_tile<THREADS>(tile_x, x, 0, 0, side, C);
    load_tile<THREADS>(tile_qx, qx, 0, 0, side, C);
#if SAVE
    load_tile<THREADS>(tile_a, a, 0, 0, side, C);
#endif
    ptx::copy_commit();
    // A batch of loads before the first store: the compiler may not move one across the other.
    for (int i = threadIdx.x; i < ((C + 3) & ~3); i += THREADS) weight[i] = i < C ? strength[i] : 0.0f;
    float* const cells = reinterpret_cast<float*>(held);
    for (int base = threadIdx.x; base < C * COLUMNS; base += BATCH * THREADS) {
        float value[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int cell = base + b * THREADS, column = slice + cell % COLUMNS;
            value[b] = 0.0f;
            if (cell < C * COLUMNS && column < D) value[b] = residual[(rows + cell / COLUMNS) * D + column];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (base + b * THREADS < C * COLUMNS) cells[base + b * THREADS] = value[b];
    }
    ptx::copy_wait<0>();
    __syncthreads();

    for (int first = 0; first < C; first += TILE) {
        const int column = slice + group * WIDTH;
        float seen[2][WIDTH] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < WIDTH; ++c)
                if (first + row + r < chunk.tokens && column + c < D)
                    seen[r][c] = inter[(rows + first + row + r) * D + column + c];
        Part sum[2][2] = {};
        for (int begin = 0; begin <= first; begin += TILE) {
            if (first > 0) {
                __syncthreads();
                load_tile<THREADS>(tile_x, x, first, begin, side, C);
                load_tile<THREADS>(tile_qx, qx, first, begin, side, C);
                ptx::copy_commit();
                ptx::copy_wait<0>();
                __syncthreads();
            }
            if (first + row < C)
                add_rows<2, TILE, GROUPS>(sum, tile_x + row * (side + 4), side * (side + 4), side + 4,
                                          held + begin * GROUPS + group, weight + begin, first + row - begin, 1,
                                          C - begin);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + row + r;
            if (i >= C) break;
#if SAVE
            change[i * GROUPS + group] = sum[0][r];
#endif
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) {
                if (column + c >= D) break;
                delta[(rows + i) * D + column + c] = sum[0][r].c[c];
                if (i < chunk.rows) {
                    const float y = i < chunk.tokens ? sum[1][r].c[c] + seen[r][c] : 0.0f;
                    readings[(chunk.first_row + i) * D + column + c] = from_float<BANK>(y);
                }
            }
        }
    }
    ptx::pdl_trigger();
#if SAVE
    __syncthreads();
    for (int first = 0; first < C; first += TILE) {
        Part sum[2][2] = {};
        for (int begin = 0; begin <= first; begin += TILE) {
            if (first > 0) {
                __syncthreads();
                load_tile<THREADS>(tile_a, a, first, begin, side, C);
                ptx::copy_commit();
                ptx::copy_wait<0>();
                __syncthreads();
            }
            if (first + row < C)
                add_rows<1, TILE, GROUPS>(sum, tile_a + row * (side + 4), 0, side + 4, change + begin * GROUPS + group,
                                          nullptr, first + row - begin, 0, C - begin);
        }
        const int column = slice + group * WIDTH;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + row + r;
            if (i >= C) break;
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) {
                if (column + c >= D) break;
                err[((static_cast<long long>(step) * P + p) * C + i) * D + column + c] =
                    held[i * GROUPS + group].c[c] - sum[0][r].c[c];
            }
        }
    }
#endif
}
