// The d_u update of a persistent backward: columns of X and QX of the block's tokens, tile by tile, times gwr and gr.
#pragma once

#include "tiles.cuh"
#include "walk_back.cuh"

struct Update : BackWalk {
    // A tile: TILE rows from `begin` on, of the pairs of pass `pass`.
    struct Job {
        int pass, begin;
    };

    // The first token of a pair.
    __device__ __forceinline__ int pair_token(int pass, int pair) const {
        return 2 * (rank + blocks * (pass * pairs + pair));
    }
    // The first tile of a pass; every pass has one, so that the blocks of a cluster meet at the same barriers.
    __device__ __forceinline__ Job first_job(int pass) const {
        return Job{pass, min(pair_token(pass, 0), C - 1) / TILE * TILE};
    }
    __device__ __forceinline__ bool ends_pass(const Job& job) const {
        return job.begin + TILE >= C;
    }
    // Passes run upwards: where lam takes the place of gwr, a later pass reads only later rows.
    __device__ __forceinline__ Job next_job(const Job& job) const {
        return ends_pass(job) ? first_job(job.pass + 1) : Job{job.pass, job.begin + TILE};
    }
    // Starts the copies of a job to a stage, and takes the next job.
    __device__ __forceinline__ void fetch_job(const Step& step, Job& job, int stage) const {
        if (job.pass < passes) {
            const long long matrix = step.call * C * C;
            for (int cell = thread; cell < TILE * pairs; cell += THREADS) {
                const int row = cell / pairs, i = job.begin + row, j = pair_token(job.pass, cell - row * pairs);
                if (i >= C || j > i) continue;
                Factors* const to = tiles() + stage * TILE * pairs + cell;
                const float *const of_qx = qx + matrix + static_cast<long long>(i) * C + j,
                                   *const of_x = x + matrix + static_cast<long long>(i) * C + j;
                if (C % 2 == 0) {
                    ptx::copy_async_8(&to->qx, of_qx);
                    ptx::copy_async_8(&to->x, of_x);
                    continue;
                }
                ptx::copy_async_4(&to->qx.x, of_qx);
                ptx::copy_async_4(&to->x.x, of_x);
                if (j + 1 < C) {
                    ptx::copy_async_4(&to->qx.y, of_qx + 1);
                    ptx::copy_async_4(&to->x.y, of_x + 1);
                } else {
                    to->qx.y = to->x.y = 0.0f;
                }
            }
            job = next_job(job);
        }
        ptx::copy_commit();
    }
    // Starts the step's first two jobs; returns the third.
    __device__ __forceinline__ Job start(const Step& step) const {
        Job job = first_job(0);
        fetch_job(step, job, 0);
        fetch_job(step, job, 1);
        return job;
    }
    // Whether this warp has no pair of columns.
    __device__ __forceinline__ bool idle() const {
        return warp() * 32 / GROUPS >= pairs;
    }
    // `ready`: the first two jobs are there for the whole block.
    __device__ __forceinline__ void run(const Step& step, Job ahead, bool ready) const {
        const int pair = thread / GROUPS, group = thread % GROUPS;
        const int place = place_of(group / PLANES, group % PLANES);
        float4 sum[2] = {};
        Job job = first_job(0);
        for (int done = 0; job.pass < passes; ++done) {
            const int stage = done % 2, j = pair_token(job.pass, pair);
            const bool mine = pair < pairs && j < C;
            if (!ready || done >= 2) {
                ptx::copy_wait<1>();
                __syncthreads();
            }
            if (mine) add_tile(job.begin, j, tiles() + stage * TILE * pairs + pair, place, group, sum);
            if (ahead.pass < passes) {
                __syncthreads();
                fetch_job(step, ahead, stage);
            } else {
                ptx::copy_commit();
            }
            if (ends_pass(job)) {
                if (in_place) {
                    arrive();
                    wait();
                }
                if (mine) finish(step, j, place, group, sum);
                sum[0] = sum[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            job = next_job(job);
        }
        ptx::copy_wait<0>();
    }
    // Adds rows of a tile, from the diagonal on: of each row first the term of QX.
    __device__ __forceinline__ void add_tile(int begin, int j, const Factors* tile, int place, int group,
                                             float4 (&sum)[2]) const {
        const int end = min(begin + TILE, C);
        const auto load_gr = [&](int i) {
            const BANK* const from = readings() + i * COLUMNS + group * 4;
            float gr[4];
            unpack<BANK, 4>(*reinterpret_cast<const Word<BANK, 4>*>(from), gr);
            return make_float4(gr[0], gr[1], gr[2], gr[3]);
        };
        int i = max(begin, j);
        if (i == j && i < end) {  // the pair's second column has no term yet
            add_product(sum[0], tile[(i - begin) * pairs].qx.x, load_gr(i));
            add_product(sum[0], tile[(i - begin) * pairs].x.x,
                        *reinterpret_cast<const float4*>(written() + i * COLUMNS + place));
            ++i;
        }
#pragma unroll 4
        for (; i < end; ++i) {
            const Factors factors = tile[(i - begin) * pairs];
            const float4 gr = load_gr(i), gw = *reinterpret_cast<const float4*>(written() + i * COLUMNS + place);
            add_product(sum[0], factors.qx.x, gr);
            add_product(sum[1], factors.qx.y, gr);
            add_product(sum[0], factors.x.x, gw);
            add_product(sum[1], factors.x.y, gw);
        }
    }
    // lam to the cluster and to memory, grad_v to the caller.
    __device__ __forceinline__ void finish(const Step& step, int first, int place, int group,
                                           const float4 (&sum)[2]) const {
        const int at = slice + group * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = first + r;
            if (j >= C) break;
            for (int other = 0; other < blocks; ++other)
                *reinterpret_cast<float4*>(ptx::map_shared(adjoint(), other) + j * COLUMNS + place) = sum[r];
            const float beta = weight()[j], values[4] = {sum[r].x, sum[r].y, sum[r].z, sum[r].w};
            float* const to = lam + (step.call * C + j) * D + at;
            BANK* const grad = grad_v + (step.chunk.first_row + j) * D + at;
            const bool given = j < step.chunk.rows;
            if (VECTOR == WORD) {
                if (at >= D) continue;
                const float scaled[4] = {beta * values[0], beta * values[1], beta * values[2], beta * values[3]};
                *reinterpret_cast<float4*>(to) = sum[r];
                if (given) store_values(grad, scaled);
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (at + c >= D) break;
                    to[c] = values[c];
                    if (given) grad[c] = from_float<BANK>(beta * values[c]);
                }
            }
        }
    }
};
