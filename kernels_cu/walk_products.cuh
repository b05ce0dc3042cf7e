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

using Part = Columns<WIDTH>;

// The first of the columns that a group of the products holds (store_slice).
static __device__ __forceinline__ int column_of(int group) {
    const int quad = group * WIDTH / 4, quads = COLUMNS / 4 / PLANES;
    return quad % quads * 4 * PLANES + quad / quads * 4 + group * WIDTH % 4;
}

// Before loops that every warp of a step goes through a few times: where nothing is kept, less code is faster; where err
// is kept, it is not.
#if SAVE
#define SHORT_CODE
#else
#define SHORT_CODE _Pragma("unroll 1")
#endif

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
        const auto fetch = [&](int r, int c) {
            const int i = token(job.pass * 2 * pairs + r), column = job.begin + c;
            if (column > i) return;
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
        };
        if (side == TILE) {  // no division
            SHORT_CODE
            for (int cell = threadIdx.x; cell < 2 * pairs * TILE / 4; cell += THREADS)
                fetch(cell / (TILE / 4), cell % (TILE / 4) * 4);
        } else {
            const int quarters = side / 4;
            SHORT_CODE
            for (int cell = threadIdx.x; cell < 2 * pairs * quarters; cell += THREADS)
                fetch(cell / quarters, cell % quarters * 4);
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
    // Calls `ask_ahead` once, as soon as the first tiles have come: the group of copies that it commits has time until
    // the second tiles are needed, or until the end.
    template <class AskAhead>
    __device__ __forceinline__ void run(const Step& step, Job ahead, const AskAhead& ask_ahead) const {
        const int pair = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
        Part sum[2][2] = {};
        int stage = 0;
        bool first = true;
        for (Job job = first_job(); !job.done; advance(job)) {
            const int t = job.pass * 2 * pairs + 2 * pair, i = token(t);
            const bool mine = pair < pairs && i < C;
            const float* const rows = tile_of(stage, 0) + 2 * pair * (side + 4);
            ptx::copy_wait<1>();
            __syncthreads();
            if (first) ask_ahead();
            first = false;
            if (mine) {
                const Part* const values =
                    reinterpret_cast<const Part*>((job.err ? delta : residual) + job.begin * COLUMNS) + group;
                if (job.err)
                    add_rows<1, TILE, GROUPS>(sum, rows, 0, side + 4, values, nullptr, i - job.begin, 0, C - job.begin);
                else
                    add_rows<2, TILE, GROUPS>(sum, rows, 2 * pairs * (side + 4), side + 4, values, weight + job.begin,
                                              i - job.begin, 1, C - job.begin);
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
                for (int r = 0; r < 2; ++r) sum[m][r] = Part{};
        }
    }
    // delta to the cluster, readings to the caller.
    __device__ __forceinline__ void finish_rows(const Step& step, int row, int t, int group,
                                                const Part (&sum)[2][2]) const {
        const int column = slice + column_of(group);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + r;
            if (i >= C) break;
            const int at = i * COLUMNS + group * WIDTH;
            if (SAVE && in_place) store_err(step, i, column, *reinterpret_cast<const Part*>(residual + at));
            SHORT_CODE
            for (int other = 0; other < blocks; ++other)
                *reinterpret_cast<Part*>(ptx::map_shared(delta, other) + at) = sum[0][r];
            if (i >= step.chunk.rows || column >= D) continue;
            const Part seen = *reinterpret_cast<const Part*>(inter + (t + r) * COLUMNS + group * WIDTH);
            float y[WIDTH];
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) y[c] = i < step.chunk.tokens ? sum[1][r].c[c] + seen.c[c] : 0.0f;
            BANK* const to = readings + (step.chunk.first_row + i) * D + column;
            if (D % WIDTH == 0) {
                store_values<WIDTH>(to, y);
            } else {
#pragma unroll
                for (int c = 0; c < WIDTH; ++c)
                    if (column + c < D) to[c] = from_float<BANK>(y[c]);
            }
        }
    }
    __device__ __forceinline__ void finish_err(const Step& step, int row, int group, const Part (&sum)[2]) const {
        const int column = slice + column_of(group);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + r;
            if (i >= C || column >= D) break;
            // In place, residual waits where this same thread has stored it.
            Part left = in_place ? load_err(step, i, column)
                                 : *reinterpret_cast<const Part*>(residual + i * COLUMNS + group * WIDTH);
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) left.c[c] -= sum[r].c[c];
            store_err(step, i, column, left);
        }
    }
    __device__ __forceinline__ void store_err(const Step& step, int i, int column, const Part& x) const {
        float* const to = err + (step.call * C + i) * D + column;
        if (D % WIDTH == 0) {
            if (column < D) *reinterpret_cast<Part*>(to) = x;
        } else {
#pragma unroll
            for (int c = 0; c < WIDTH; ++c)
                if (column + c < D) to[c] = x.c[c];
        }
    }
    __device__ __forceinline__ Part load_err(const Step& step, int i, int column) const {
        const float* const from = err + (step.call * C + i) * D + column;
        if (D % WIDTH == 0) return *reinterpret_cast<const Part*>(from);
        Part x;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) x.c[c] = column + c < D ? from[c] : 0.0f;
        return x;
    }
};
