// The gradients of the Gram matrices and of the write strengths, of all chunks at once.
//
//     d_a[i, j] = -strength_i strength_j <lam_i, err_j>,  j <  i, else 0          grad_beta[i] = <lam_i, err_i>
//     d_qk[i, j] = strength_j <gr_i, err_j>,              j <= i, else 0
//
// since delta = strength err. Padded tokens have lam, err and gr 0, whatever their rows hold.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (4: D is a multiple of 4 and of the values of BANK in 16 bytes; 1: any D).
// Grid    (chunks * tiles of TILE x TILE tokens on and below the diagonal): tiles of a chunk are neighbours, since they
//         read the same rows.
// Block   THREADS threads, 4 x 4 tokens each, EIGHTH apart: neighbouring threads meet in no bank of shared memory.
// Reads   lam, err [chunks, C, D], strength [chunks, C], grad_readings [rows, D], lengths, cu_seqlens (chunk.cuh).
// Writes  d_a, d_qk [chunks, C, C], all of them; grad_beta [rows] (0 on padding).
// Sums    over columns upwards in blocks of BLOCK, then the blocks in order: IEEE float32, whatever D is split into.
// Shared  static: STAGES times DEPTH columns of three tiles; two stages are on their way while one is added.
#include "chunk.cuh"
#include "numeric.cuh"

#define TILE 32
#define THREADS 64
#define EIGHTH (TILE / 4)
#define DEPTH 32  // columns of a stage
#define STAGES 3
#define BLOCK 128

// DEPTH columns of TILE rows. Rows lie 16 bytes more apart, so that the same column of eight of them is in other banks.
template <class T>
struct Tile {
    static constexpr int STRIDE = DEPTH + 16 / static_cast<int>(sizeof(T));
    T value[TILE][STRIDE];

    // Starts copying columns `column` on of `row`, of which this thread brings every other word to row `token`; 0 from
    // column D on, and everywhere where the token is not `present`.
    __device__ __forceinline__ void fetch(int token, const T* row, int column, int D, bool present) {
        constexpr int WORD = 16 / static_cast<int>(sizeof(T)), WORDS = DEPTH / WORD, LOADERS = THREADS / TILE;
        constexpr int PIECE = VECTOR > 1 ? WORD : 1;
#pragma unroll
        for (int w = 0; w < WORDS; w += LOADERS) {
            const int word = (w + threadIdx.x % LOADERS) * WORD;
#pragma unroll
            for (int c = 0; c < WORD; c += PIECE) {
                T* const to = &value[token][word + c];
                const int at = column + word + c;
                if (!present || at >= D) {
#pragma unroll
                    for (int k = 0; k < PIECE; ++k) to[k] = from_float<T>(0.0f);
                } else if constexpr (PIECE > 1) {
                    ptx::copy_async_16(to, row + at);
                } else if constexpr (sizeof(T) == 4) {
                    ptx::copy_async_4(to, row + at);
                } else {
                    *to = row[at];
                }
            }
        }
    }
    __device__ __forceinline__ void load_four(int token, int column, float (&x)[4]) const {
        unpack_pairs<T, 4>(*reinterpret_cast<const Word<T, 4>*>(&value[token][column]), x);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    gram_backward(const float* lam, const float* err, const float* strength, const BANK* grad_readings,
                  const void* lengths, const void* cu_seqlens, float* d_a, float* d_qk, float* grad_beta, int P, int T,
                  int C, int D, int wide) {
    __shared__ __align__(16) Tile<float> of_lam[STAGES], of_err[STAGES];
    __shared__ __align__(16) Tile<BANK> of_gr[STAGES];
    const int side = (C + TILE - 1) / TILE, tiles = side * (side + 1) / 2;
    const long long n = blockIdx.x / tiles;
    int tile_i = 0, tile_j = blockIdx.x % tiles;  // row by row of the lower triangle
    while (tile_j > tile_i) tile_j -= ++tile_i;
    const Chunk chunk = chunk_at(n, P, T, C, lengths, cu_seqlens, wide);
    lam += n * C * D, err += n * C * D, strength += n * C;

    // As a loader: every other word of one token. As a worker: tokens row + y EIGHTH and col + x EIGHTH of the tiles.
    const int token = threadIdx.x / (THREADS / TILE), i = tile_i * TILE + token, j = tile_j * TILE + token;
    const int row = threadIdx.x / EIGHTH, col = threadIdx.x % EIGHTH;
    const auto fetch = [&](int at, int stage) {
        if (at < D) {
            of_lam[stage].fetch(token, lam + static_cast<long long>(i) * D, at, D, i < chunk.tokens);
            of_gr[stage].fetch(token, grad_readings + (chunk.first_row + i) * D, at, D, i < chunk.tokens);
            of_err[stage].fetch(token, err + static_cast<long long>(j) * D, at, D, j < chunk.tokens);
        }
        ptx::copy_commit();
    };

    float total[2][4][4] = {}, sum[2][4][4] = {};
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage * DEPTH, stage);
    for (int at = 0, stage = 0; at < D; at += DEPTH, stage = stage + 1 < STAGES ? stage + 1 : 0) {
        ptx::copy_wait<STAGES - 2>();
        __syncthreads();  // the stage has come, and the one before it is free
        fetch(at + (STAGES - 1) * DEPTH, stage > 0 ? stage - 1 : STAGES - 1);
#pragma unroll 2
        for (int k = 0; k < DEPTH; k += 4) {
            float a[4][4], b[4][4];
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                of_lam[stage].load_four(row + y * EIGHTH, k, a[y]);
                of_gr[stage].load_four(row + y * EIGHTH, k, b[y]);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                float c[4];
                of_err[stage].load_four(col + x * EIGHTH, k, c);
#pragma unroll
                for (int y = 0; y < 4; ++y)
#pragma unroll
                    for (int z = 0; z < 4; ++z) {
                        sum[0][y][x] = fmaf(a[y][z], c[z], sum[0][y][x]);
                        sum[1][y][x] = fmaf(b[y][z], c[z], sum[1][y][x]);
                    }
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
    }
    ptx::copy_wait<0>();  // the last groups are empty

#pragma unroll
    for (int y = 0; y < 4; ++y) {
        const int to_i = tile_i * TILE + row + y * EIGHTH;
        if (to_i >= C) break;
        const float beta = strength[to_i];
        float* const out_a = d_a + (n * C + to_i) * C;
        float* const out_qk = d_qk + (n * C + to_i) * C;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int to_j = tile_j * TILE + col + x * EIGHTH;
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
