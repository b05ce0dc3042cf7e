// The products of a persistent forward: rows of X, QX and A of the block's tokens, tile by tile, times residual and
// delta.
#pragma once

#include "tiles.cuh"
#include "walk.cuh"

// A tile of the products: the first ones of X and QX, then those of A.
struct Job {
    bool err, done;
    int pass, begin;
};

// The first of the four columns that a group of the products holds.
static __device__ __forceinline__ int column_of(int group) {
    return group % (GROUPS / PLANES) * 4 * PLANES + group / (GROUPS / PLANES) * 4;
}

static __device__ __forceinline__ float4 scaled(const float4& x, const float* weights, int i) {
    if (weights == nullptr) return x;
    const float weight = weights[i];
    return make_float4(weight * x.x, weight * x.y, weight * x.z, weight * x.w);
}
static __device__ __forceinline__ float component(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Adds two neighbouring rows of tiles times `values` (rows of GROUPS float4, each times its weight). The first row
// reaches its diagonal at column `reach` of the tile; `ends` is 1 where the diagonal counts.
template <int Matrices>
static __device__ __forceinline__ void add_rows(float4 (&sum)[2][2], const float* rows, int matrix, int row,
                                                const float4* values, const float* weights, int reach, int ends,
                                                int columns) {
    if (reach < 0) return;
    const int full = reach < TILE ? reach & ~3 : TILE;
    for (int j = 0; j < full; j += 4) {
        float4 value[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = scaled(values[(j + k) * GROUPS], weights, j + k);
#pragma unroll
        for (int m = 0; m < Matrices; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float4 factors = *reinterpret_cast<const float4*>(rows + m * matrix + r * row + j);
#pragma unroll
                for (int k = 0; k < 4; ++k) add_product(sum[m][r], component(factors, k), value[k]);
            }
    }
    if (reach >= TILE) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        for (int j = full; j < min(reach + r + ends, columns); ++j) {
            const float4 value = scaled(values[j * GROUPS], weights, j);
#pragma unroll
            for (int m = 0; m < Matrices; ++m) add_product(sum[m][r], rows[m * matrix + r * row + j], value);
        }
}

struct Products : Walk {
    __device__ __forceinline__ Job first_job() const {
        return Job{false, false, passes - 1, 0};
    }
    __device__ __forceinline__ bool ends_pass(const Job& job) const {
        return job.begin + TILE >= min(C, 2 * blocks * pairs * (job.pass + 1));
    }
    // Passes run downwards: where delta takes the place of residual, a later pass reads only earlier rows.
    __device__ __forceinline__ void advance(Job& job) const {
        if (!ends_pass(job)) {
            job.begin += TILE;
        } else {
            job.begin = 0;
            if (--job.pass < 0) {
                job.done = job.err || !SAVE;
                job.err = true;
                job.pass = passes - 1;
            }
        }
    }
    __device__ __forceinline__ float* tile_of(int stage, int matrix) const {
        return tiles + (stage * 2 + matrix) * 2 * pairs * (side + 4);
    }
    __device__ __forceinline__ void fetch_tile(float* tile, const float* matrix, const Job& job) const {
        const int quarters = side / 4;
        for (int cell = threadIdx.x; cell < 2 * pairs * quarters; cell += THREADS) {
            const int r = cell / quarters, c = cell % quarters * 4;
            const int i = token(job.pass * 2 * pairs + r), column = job.begin + c;
            if (column > i) continue;
            const float* const from = matrix + static_cast<long long>(i) * C + column;
            float* const to = tile + r * (side + 4) + c;
            if (i >= C) {  // the row beside the last
                *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            } else if (C % 4 == 0) {
                ptx::copy_async_16(to, from);
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (column + k < C) ptx::copy_async_4(to + k, from + k);
            }
        }
    }
    // Starts the copies of a job, and takes the next.
    __device__ __forceinline__ void fetch_job(const Step& step, Job& job, int stage) const {
        if (!job.done) {
            const long long matrix = step.n * C * C;
            if (job.err) {
                fetch_tile(tile_of(stage, 0), a + matrix, job);
            } else {
                fetch_tile(tile_of(stage, 0), x + matrix, job);
                fetch_tile(tile_of(stage, 1), qx + matrix, job);
            }
            advance(job);
        }
        ptx::copy_commit();
    }
    // Starts the step's first two jobs; returns the third.
    __device__ __forceinline__ Job start(const Step& step) const {
        for (int i = threadIdx.x; i < C; i += THREADS) ptx::copy_async_4(weight + i, strength + step.n * C + i);
        Job job = first_job();
        fetch_job(step, job, 0);
        fetch_job(step, job, 1);
        return job;
    }
    __device__ __forceinline__ void run(const Step& step, Job ahead) const {
        const int pair = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
        float4 sum[2][2] = {};
        int stage = 0;
        for (Job job = first_job(); !job.done; advance(job)) {
            const int t = job.pass * 2 * pairs + 2 * pair, i = token(t);
            const bool mine = pair < pairs && i < C;
            const float* const rows = tile_of(stage, 0) + 2 * pair * (side + 4);
            ptx::copy_wait<1>();
            __syncthreads();
            if (mine) {
                const float4* const values =
                    reinterpret_cast<const float4*>((job.err ? delta : residual) + job.begin * COLUMNS) + group;
                if (job.err)
                    add_rows<1>(sum, rows, 0, side + 4, values, nullptr, i - job.begin, 0, C - job.begin);
                else
                    add_rows<2>(sum, rows, 2 * pairs * (side + 4), side + 4, values, weight + job.begin, i - job.begin,
                                1, C - job.begin);
            }
            __syncthreads();
            fetch_job(step, ahead, stage);
            stage ^= 1;
            if (!ends_pass(job)) continue;
            if (job.err) {
                if (mine) finish_err(step, i, group, sum[0]);
            } else {
                if (in_place) cluster_sync();
                if (mine) finish_rows(step, i, t, group, sum);
                if (job.pass == 0) cluster_sync();
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) sum[m][r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        ptx::copy_wait<0>();
    }
    // delta to the cluster, readings to the caller.
    __device__ __forceinline__ void finish_rows(const Step& step, int row, int t, int group,
                                                const float4 (&sum)[2][2]) const {
        const int column = slice + column_of(group);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + r;
            if (i >= C) break;
            const int at = i * COLUMNS + group * 4;
            if (SAVE && in_place) store_err(step, i, column, *reinterpret_cast<const float4*>(residual + at));
            for (int other = 0; other < blocks; ++other)
                *reinterpret_cast<float4*>(ptx::map_shared(delta, other) + at) = sum[0][r];
            if (i >= step.chunk.rows || column >= D) continue;
            const float4 seen = *reinterpret_cast<const float4*>(inter + (t + r) * COLUMNS + group * 4);
            float y[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                y[c] = i < step.chunk.tokens ? component(sum[1][r], c) + component(seen, c) : 0.0f;
            BANK* const to = readings + (step.chunk.first_row + i) * D + column;
            if (D % 4 == 0) {
                store_values<4>(to, y);
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (column + c < D) to[c] = from_float<BANK>(y[c]);
            }
        }
    }
    __device__ __forceinline__ void finish_err(const Step& step, int row, int group, const float4 (&sum)[2]) const {
        const int column = slice + column_of(group);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + r;
            if (i >= C || column >= D) break;
            // In place, residual waits where this same thread has stored it.
            const float4 left = in_place ? load_err(step, i, column)
                                         : *reinterpret_cast<const float4*>(residual + i * COLUMNS + group * 4);
            store_err(step, i, column,
                      make_float4(left.x - sum[r].x, left.y - sum[r].y, left.z - sum[r].z, left.w - sum[r].w));
        }
    }
    __device__ __forceinline__ void store_err(const Step& step, int i, int column, const float4& x) const {
        float* const to = err + (step.call * C + i) * D + column;
        if (D % 4 == 0) {
            if (column < D) *reinterpret_cast<float4*>(to) = x;
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (column + c < D) to[c] = component(x, c);
        }
    }
    __device__ __forceinline__ float4 load_err(const Step& step, int i, int column) const {
        const float* const from = err + (step.call * C + i) * D + column;
        if (D % 4 == 0) return *reinterpret_cast<const float4*>(from);
        return make_float4(from[0], column + 1 < D ? from[1] : 0.0f, column + 2 < D ? from[2] : 0.0f,
                           column + 3 < D ? from[3] : 0.0f);
    }
};
