// The adjoint of a step's updates u, and the gradient of its values.
//
//     lam = QX^T gr + X^T gwr          grad_v = strength lam
//
// Padded tokens have gr and gwr 0, whatever their rows hold, and so lam and grad_v.
//
// Macros  BANK (float, Bf16, Fp16), COLUMNS (of a block, a multiple of 4).
// Grid    (P streams, slices of COLUMNS columns).
// Block   THREADS = TILE / 2 * COLUMNS / WIDTH threads: pairs of rows by groups of WIDTH columns.
// Reads   gwr [P, C, D]; x, qx [chunks, C, C], strength [chunks, C]; grad_readings [rows, D], lengths, cu_seqlens
//         (chunk.cuh).
// Writes  lam [chunks, C, D]; grad_v [rows, D] (0 on padding).
// Sums    lam[j]: over i upwards from j, of each i first the term of qx: what lies above the diagonal is never added.
// Shared  dynamic, with side = min(TILE, C rounded up to 4): 2 C COLUMNS floats, then 2 tiles of side * (side + 4)
//         floats less the last 4; the launch asks for more, so that an SM holds one block at a time.
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
    du_update(const float* x, const float* qx, const float* strength, const BANK* grad_readings, const float* gwr,
              const void* lengths, const void* cu_seqlens, float* lam, BANK* grad_v, int step, int P, int T, int C,
              int D, int wide) {
    const int side = min(TILE, (C + 3) & ~3);
    float* const readings = ptx::dynamic_shared<float>();  // [C, COLUMNS], gr
    float* const written = readings + C * COLUMNS;         // [C, COLUMNS], gwr
    float* const tile_x = written + C * COLUMNS;           // [side, side + 4]
    float* const tile_qx = tile_x + side * (side + 4);
    const int p = blockIdx.x, slice = blockIdx.y * COLUMNS;
    const int row = threadIdx.x / GROUPS * 2, group = threadIdx.x % GROUPS;
    const long long n = static_cast<long long>(step) * P + p;
    x += n * C * C, qx += n * C * C, lam += n * C * D, strength += n * C;
    gwr += static_cast<long long>(p) * C * D;

    const Chunk chunk = chunk_of(step, p, T, C, lengths, cu_seqlens, wide);
    load_tile<THREADS>(tile_x, x, 0, 0, side, C);
    load_tile<THREADS>(tile_qx, qx, 0, 0, side, C);
    ptx::copy_commit();
    // Batches of loads before their stores: the compiler may not move one across the other.
    for (int base = threadIdx.x; base < C * COLUMNS; base += BATCH * THREADS) {
        BANK value[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int cell = base + b * THREADS, i = cell / COLUMNS, column = slice + cell % COLUMNS;
            value[b] = BANK{};
            if (i < chunk.tokens && column < D) value[b] = grad_readings[(chunk.first_row + i) * D + column];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (base + b * THREADS < C * COLUMNS) readings[base + b * THREADS] = to_float(value[b]);
    }
    ptx::pdl_wait();
    ptx::pdl_trigger();
    for (int base = threadIdx.x; base < C * COLUMNS; base += BATCH * THREADS) {
        float value[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int cell = base + b * THREADS, column = slice + cell % COLUMNS;
            value[b] = 0.0f;
            if (cell < C * COLUMNS && column < D) value[b] = gwr[static_cast<long long>(cell / COLUMNS) * D + column];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (base + b * THREADS < C * COLUMNS) written[base + b * THREADS] = value[b];
    }
    ptx::copy_wait<0>();
    __syncthreads();

    const Part* const of_readings = reinterpret_cast<const Part*>(readings) + group;
    const Part* const of_written = reinterpret_cast<const Part*>(written) + group;
    for (int first = 0; first < C; first += TILE) {
        Part sum[2] = {};
        for (int begin = first; begin < C; begin += TILE) {
            if (C > TILE) {
                __syncthreads();
                load_tile<THREADS>(tile_x, x, begin, first, side, C);
                load_tile<THREADS>(tile_qx, qx, begin, first, side, C);
                ptx::copy_commit();
                ptx::copy_wait<0>();
                __syncthreads();
            }
            if (first + row >= C) continue;
            const int end = min(TILE, C - begin);
            int i = 0;
            if (begin == first) {  // on the diagonal the pair's second row has no term yet
                add_product(sum[0], tile_qx[row * (side + 4) + row], of_readings[(begin + row) * GROUPS]);
                add_product(sum[0], tile_x[row * (side + 4) + row], of_written[(begin + row) * GROUPS]);
                i = row + 1;
            }
#pragma unroll 4
            for (; i < end; ++i) {
                const float2 of_qx = *reinterpret_cast<const float2*>(tile_qx + i * (side + 4) + row);
                const float2 of_x = *reinterpret_cast<const float2*>(tile_x + i * (side + 4) + row);
                const Part gr = of_readings[(begin + i) * GROUPS], gw = of_written[(begin + i) * GROUPS];
                add_product(sum[0], of_qx.x, gr);
                add_product(sum[1], of_qx.y, gr);
                add_product(sum[0], of_x.x, gw);
                add_product(sum[1], of_x.y, gw);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = first + row + r;
            if (j >= C) break;
            const float beta = strength[j];
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) {
                const int column = slice + group * WIDTH + c;
                if (column >= D) break;
                lam[static_cast<long long>(j) * D + column] = sum[r].c[c];
                if (j < chunk.rows) grad_v[(chunk.first_row + j) * D + column] = from_float<BANK>(beta * sum[r].c[c]);
            }
        }
    }
}
