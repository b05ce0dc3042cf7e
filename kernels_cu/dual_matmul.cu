// The two triangular products of a step, and the readings.
//
//     u = strength residual      delta = X u      y = QX u + inter      err = residual - tril(A, -1) delta
//
// Padded tokens have strength, residual and inter 0; their readings are 0.
//
// Macros  BANK (float, Bf16, Fp16), COLUMNS (of a block, a multiple of 4), SAVE (1: err is written).
// Grid    (P streams, slices of COLUMNS columns).
// Block   THREADS = TILE / 2 * COLUMNS / 4 threads: pairs of rows by groups of 4 columns.
// Reads   residual, inter [P, C, D]; x, qx, a [chunks, C, C] and strength [chunks, C] of the slab.
// Writes  delta [P, C, D]; readings [rows, D] (0 on padding); err [all chunks, C, D] (SAVE).
// Sums    over j upwards, j <= i (err: j < i): what lies above the diagonal is never added.
// Shared  dynamic, with C4 = C rounded up to 4 and side = min(TILE, C4): C4 + (1 + SAVE) C COLUMNS floats, then
//         2 + SAVE tiles of side * (side + 4) floats less the last 4.
#include "chunk.cuh"
#include "numeric.cuh"
#include "tiles.cuh"

#define TILE 64
#define GROUPS (COLUMNS / 4)
#define THREADS (TILE / 2 * GROUPS)
#define BATCH 8

static __device__ __forceinline__ float4 scaled(const float4& x, const float* weights, int i) {
    if (weights == nullptr) return x;
    const float weight = weights[i];
    return make_float4(weight * x.x, weight * x.y, weight * x.z, weight * x.w);
}
static __device__ __forceinline__ float component(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Adds tile rows `row` and `row + 1` times `values` (rows of GROUPS float4, each times its weight): all `full` columns (a multiple of 4), then
// of the next four those up to `ends` past the row's own place (1: the diagonal counts, 0: it does not).
template <int Matrices>
static __device__ __forceinline__ void add_rows(float4 (&sum)[Matrices][2], const float* const (&tiles)[Matrices],
                                                const float4* values, const float* weights, int row, int full,
                                                bool diagonal, int ends, int side, int C) {
    for (int j = 0; j < full; j += 4) {
        float4 value[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = scaled(values[(j + k) * GROUPS], weights, j + k);
#pragma unroll
        for (int m = 0; m < Matrices; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float4 factors = *reinterpret_cast<const float4*>(tiles[m] + (row + r) * (side + 4) + j);
#pragma unroll
                for (int k = 0; k < 4; ++k) add_product(sum[m][r], component(factors, k), value[k]);
            }
    }
    if (!diagonal) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        for (int j = full; j < min(row + r + ends, C); ++j) {
            const float4 value = scaled(values[j * GROUPS], weights, j);
#pragma unroll
            for (int m = 0; m < Matrices; ++m) add_product(sum[m][r], tiles[m][(row + r) * (side + 4) + j], value);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dual_matmul(const float* residual, const float* inter, const float* x, const float* qx, const float* a,
                const float* strength, const void* lengths, const void* cu_seqlens, float* delta, BANK* readings,
                float* err, int step, int slab_step, int P, int T, int C, int D, int wide) {
    const int side = min(TILE, (C + 3) & ~3);
    float* const weight = ptx::dynamic_shared<float>();                       // [C4], strength
    float4* const held = reinterpret_cast<float4*>(weight + ((C + 3) & ~3));  // [C, GROUPS], residual
    float4* const change = held + SAVE * C * GROUPS;                          // [C, GROUPS], delta (SAVE)
    float* const tile_x = reinterpret_cast<float*>(change + C * GROUPS);      // [side, side + 4]
    float* const tile_qx = tile_x + side * (side + 4);
    float* const tile_a = tile_qx + side * (side + 4);  // (SAVE)
    const int p = blockIdx.x, slice = blockIdx.y * COLUMNS;
    const int row = threadIdx.x / GROUPS * 2, group = threadIdx.x % GROUPS;
    const long long n = static_cast<long long>(step - slab_step) * P + p;
    const long long rows = static_cast<long long>(p) * C;
    x += n * C * C, qx += n * C * C, a += n * C * C;
    strength += n * C;

    const Chunk chunk = chunk_at(static_cast<long long>(step) * P + p, P, T, C, lengths, cu_seqlens, wide);
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
        const int column = slice + group * 4;
        float seen[2][4] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (first + row + r < chunk.tokens && column + c < D)
                    seen[r][c] = inter[(rows + first + row + r) * D + column + c];
        float4 sum[2][2] = {};
        const float* const tiles[2] = {tile_x, tile_qx};
        for (int begin = 0; begin <= first; begin += TILE) {
            if (first > 0) {
                __syncthreads();
                load_tile<THREADS>(tile_x, x, first, begin, side, C);
                load_tile<THREADS>(tile_qx, qx, first, begin, side, C);
                ptx::copy_commit();
                ptx::copy_wait<0>();
                __syncthreads();
            }
            const bool diagonal = begin == first;
            if (first + row < C)
                add_rows<2>(sum, tiles, held + begin * GROUPS + group, weight + begin, row, diagonal ? row & ~3 : TILE,
                            diagonal, 1, side, C - begin);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + row + r;
            if (i >= C) break;
#if SAVE
            change[i * GROUPS + group] = sum[0][r];
#endif
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (column + c >= D) break;
                delta[(rows + i) * D + column + c] = component(sum[0][r], c);
                if (i < chunk.rows) {
                    const float y = i < chunk.tokens ? component(sum[1][r], c) + seen[r][c] : 0.0f;
                    readings[(chunk.first_row + i) * D + column + c] = from_float<BANK>(y);
                }
            }
        }
    }
    ptx::pdl_trigger();
#if SAVE
    __syncthreads();
    for (int first = 0; first < C; first += TILE) {
        float4 sum[1][2] = {};
        const float* const tiles[1] = {tile_a};
        for (int begin = 0; begin <= first; begin += TILE) {
            if (first > 0) {
                __syncthreads();
                load_tile<THREADS>(tile_a, a, first, begin, side, C);
                ptx::copy_commit();
                ptx::copy_wait<0>();
                __syncthreads();
            }
            const bool diagonal = begin == first;
            if (first + row < C)
                add_rows<1>(sum, tiles, change + begin * GROUPS + group, nullptr, row, diagonal ? row & ~3 : TILE,
                            diagonal, 0, side, C - begin);
        }
        const int column = slice + group * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + row + r;
            if (i >= C) break;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (column + c >= D) break;
                err[((static_cast<long long>(step) * P + p) * C + i) * D + column + c] =
                    component(held[i * GROUPS + group], c) - component(sum[0][r], c);
            }
        }
    }
#endif
}
