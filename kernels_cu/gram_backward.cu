// The gradients of the Gram matrices and of the write strengths, of all chunks at once.
//
//     d_a[i, j] = -strength_i strength_j <lam_i, err_j>,  j <  i, else 0          grad_beta[i] = <lam_i, err_i>
//     d_qk[i, j] = strength_j <gr_i, err_j>,              j <= i, else 0
//
// since delta = strength err. Padded tokens have lam, err and gr 0, whatever their rows hold.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (columns of one load, up to 4).
// Grid    (chunks * tiles of TILE x TILE tokens on and below the diagonal): tiles of a chunk are neighbours, since they
//         read the same rows.
// Block   THREADS threads, 4 x 4 tokens each.
// Reads   lam, err [chunks, C, D], strength [chunks, C], grad_readings [rows, D], lengths, cu_seqlens (chunk.cuh).
// Writes  d_a, d_qk [chunks, C, C], all of them; grad_beta [rows] (0 on padding).
// Sums    over columns upwards in blocks of BLOCK, then the blocks in order: IEEE float32, whatever D is split into.
// Shared  static: DEPTH columns of three tiles, twice.
#include "chunk.cuh"
#include "numeric.cuh"

#define TILE 32
#define THREADS 64
#define DEPTH 8                             // columns at a time
#define FOURS (DEPTH / 4 * TILE / THREADS)  // of a thread, tile and time
#define BLOCK 128
#define STRIDE (TILE + 4)

// Four columns of a row, 0 from column D on.
template <class T>
static __device__ __forceinline__ void load_four(const T* row, int column, int D, float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; c += VECTOR) {
        float values[VECTOR] = {};
        if (column + c < D) load_values(row + column + c, values);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[c + i] = values[i];
    }
}

static __device__ __forceinline__ void store_column(float (*tile)[STRIDE], int column, int token, const float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) tile[column + c][token] = x[c];
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    gram_backward(const float* lam, const float* err, const float* strength, const BANK* grad_readings,
                  const void* lengths, const void* cu_seqlens, float* d_a, float* d_qk, float* grad_beta, int P, int T,
                  int C, int D, int wide) {
    __shared__ __align__(16) float of_lam[2][DEPTH][STRIDE], of_gr[2][DEPTH][STRIDE], of_err[2][DEPTH][STRIDE];
    const int side = (C + TILE - 1) / TILE, tiles = side * (side + 1) / 2;
    const long long n = blockIdx.x / tiles;
    int tile_i = 0, tile_j = blockIdx.x % tiles;  // row by row of the lower triangle
    while (tile_j > tile_i) tile_j -= ++tile_i;
    const Chunk chunk = chunk_at(n, P, T, C, lengths, cu_seqlens, wide);
    lam += n * C * D, err += n * C * D, strength += n * C;

    // As a loader: one token, fours of columns. As a worker: tokens row .. + 4 and col .. + 4 of the tiles.
    constexpr int LOADERS = THREADS / TILE;  // of a token
    const int token = threadIdx.x / LOADERS, column = threadIdx.x % LOADERS * 4;
    const int i = tile_i * TILE + token, j = tile_j * TILE + token;
    const int row = threadIdx.x / (TILE / 4) * 4, col = threadIdx.x % (TILE / 4) * 4;
    const BANK* const readings = grad_readings + (chunk.first_row + i) * D;

    float next[3][FOURS][4] = {};
    const auto fetch = [&](int at) {
#pragma unroll
        for (int f = 0; f < FOURS; ++f) {
            const int from = at + column + f * LOADERS * 4;
            if (i < chunk.tokens) {
                load_four(lam + static_cast<long long>(i) * D, from, D, next[0][f]);
                load_four(readings, from, D, next[1][f]);
            }
            if (j < chunk.tokens) load_four(err + static_cast<long long>(j) * D, from, D, next[2][f]);
        }
    };
    const auto keep = [&](int buffer) {
#pragma unroll
        for (int f = 0; f < FOURS; ++f) {
            const int to = column + f * LOADERS * 4;
            store_column(of_lam[buffer], to, token, next[0][f]);
            store_column(of_gr[buffer], to, token, next[1][f]);
            store_column(of_err[buffer], to, token, next[2][f]);
        }
    };

    float total[2][4][4] = {}, sum[2][4][4] = {};
    fetch(0);
    keep(0);
    __syncthreads();
    for (int at = 0, buffer = 0; at < D; at += DEPTH, buffer ^= 1) {
        if (at + DEPTH < D) fetch(at + DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float a[4], b[4], c[4];
            load_floats(&of_lam[buffer][k][row], a);
            load_floats(&of_gr[buffer][k][row], b);
            load_floats(&of_err[buffer][k][col], c);
#pragma unroll
            for (int y = 0; y < 4; ++y)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    sum[0][y][x] = fmaf(a[y], c[x], sum[0][y][x]);
                    sum[1][y][x] = fmaf(b[y], c[x], sum[1][y][x]);
                }
        }
        if ((at + DEPTH) % BLOCK == 0 || at + DEPTH >= D)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int y = 0; y < 4; ++y)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        total[m][y][x] += sum[m][y][x];
                        sum[m][y][x] = 0.0f;
                    }
        if (at + DEPTH < D) keep(buffer ^ 1);
        __syncthreads();
    }

#pragma unroll
    for (int y = 0; y < 4; ++y) {
        const int to_i = tile_i * TILE + row + y;
        if (to_i >= C) break;
        const float beta = strength[to_i];
        float* const out_a = d_a + (n * C + to_i) * C;
        float* const out_qk = d_qk + (n * C + to_i) * C;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int to_j = tile_j * TILE + col + x;
            if (to_j >= C) break;
            const float other = strength[to_j];
            out_a[to_j] = to_j < to_i ? -beta * other * total[0][y][x] : 0.0f;
            out_qk[to_j] = to_j <= to_i ? other * total[1][y][x] : 0.0f;
            if (to_i == to_j && to_i < chunk.rows) grad_beta[chunk.first_row + to_i] = total[0][y][x];
            if (tile_i != tile_j) {  // the tile above the diagonal
                d_a[(n * C + to_j) * C + to_i] = 0.0f;
                d_qk[(n * C + to_j) * C + to_i] = 0.0f;
            }
        }
    }
}
