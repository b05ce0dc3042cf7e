// The triangular solve of each chunk: X = (I + diag(beta) tril(A, -1))^-1 and QX = tril(QK) X, in IEEE float32.
//
//     X[i, c] = [i == c] - beta[i] sum over j < i of A[i, j] X[j, c]        QX[i, c] = sum over j <= i of QK[i, j] X[j, c]
//
// Columns of X are independent, so a block takes a panel of them and walks the rows down.
//
// Grid    (chunks, panels of PANEL columns).
// Block   THREADS threads: TILE rows by PANEL / 4 groups of 4 columns.
// Reads   a, qk [chunks, C, C] (what lies above the diagonal is ignored), strength [chunks, C], the beta of each token.
// Writes  x, qx [chunks, C, C], all of them (0 above the diagonal).
// Sums    over j upwards, from the panel's first column.
// Shared  dynamic: the panel of X, [C, PANEL] floats, then TILE rows of A or QK, C + 1 floats apart.
#include "ptx.cuh"

#define TILE 16
#define PANEL 64
#define GROUPS (PANEL / 4)
#define THREADS (TILE * GROUPS)

static __device__ __forceinline__ void add_product(float (&sum)[4], float factor, const float4& x) {
    sum[0] = fmaf(factor, x.x, sum[0]);
    sum[1] = fmaf(factor, x.y, sum[1]);
    sum[2] = fmaf(factor, x.z, sum[2]);
    sum[3] = fmaf(factor, x.w, sum[3]);
}

// Copies rows first .. first + TILE of a [C, C] matrix, columns begin .. end, to shared memory with row stride C + 1.
static __device__ __forceinline__ void load_rows(float* tile, const float* matrix, int first, int begin, int end,
                                                 int C) {
    for (int r = threadIdx.x / 32; r < TILE && first + r < C; r += THREADS / 32)
        for (int j = begin + threadIdx.x % 32; j < end; j += 32)
            tile[r * (C + 1) + j] = ptx::load_readonly(matrix + static_cast<long long>(first + r) * C + j);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    solve(const float* a, const float* qk, const float* strength, float* x, float* qx, int C) {
    float* const panel = ptx::dynamic_shared<float>();  // [C, PANEL]
    float* const tile = panel + C * PANEL;              // [TILE, C + 1]
    const long long base = static_cast<long long>(blockIdx.x) * C * C;
    a += base, qk += base, x += base, qx += base;
    strength += static_cast<long long>(blockIdx.x) * C;
    const int begin = blockIdx.y * PANEL;
    const int r = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS * 4;
    const float4* const panel_rows = reinterpret_cast<const float4*>(panel) + group / 4;

    for (int first = 0; first < C; first += TILE) {
        const int i = first + r;
        const int end = min(first + TILE, C);
        float sum[4] = {};
        if (first + TILE > begin) {
            load_rows(tile, a, first, begin, end, C);
            __syncthreads();
            if (i < C)
                for (int j = begin; j < first; ++j)
                    add_product(sum, tile[r * (C + 1) + j], panel_rows[j * (PANEL / 4)]);
            // Inside the tile a row waits for the ones above it.
            for (int row = 0; first + row < end; ++row) {
                if (r == row) {
                    const float beta = ptx::load_readonly(strength + i);
                    float4 out;
                    out.x = (i == begin + group ? 1.0f : 0.0f) - beta * sum[0];
                    out.y = (i == begin + group + 1 ? 1.0f : 0.0f) - beta * sum[1];
                    out.z = (i == begin + group + 2 ? 1.0f : 0.0f) - beta * sum[2];
                    out.w = (i == begin + group + 3 ? 1.0f : 0.0f) - beta * sum[3];
                    reinterpret_cast<float4*>(panel)[i * (PANEL / 4) + group / 4] = out;
                }
                __syncthreads();
                const int j = first + row;
                if (r > row && i < C && j >= begin)
                    add_product(sum, tile[r * (C + 1) + j], panel_rows[j * (PANEL / 4)]);
            }
        } else if (i < C) {
            reinterpret_cast<float4*>(panel)[i * (PANEL / 4) + group / 4] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        __syncthreads();
    }

    for (int first = 0; first < C; first += TILE) {
        const int i = first + r;
        float sum[4] = {};
        if (first + TILE > begin) {
            load_rows(tile, qk, first, begin, min(first + TILE, C), C);
            __syncthreads();
            if (i < C)
                for (int j = begin; j <= i; ++j) add_product(sum, tile[r * (C + 1) + j], panel_rows[j * (PANEL / 4)]);
            __syncthreads();
        }
        if (i >= C) continue;
        const float4 solved = panel_rows[i * (PANEL / 4)];
        const float of_x[4] = {solved.x, solved.y, solved.z, solved.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = begin + group + c;
            if (column >= C) break;
            const long long at = static_cast<long long>(i) * C + column;
            x[at] = column <= i ? of_x[c] : 0.0f;
            qx[at] = column <= i ? sum[c] : 0.0f;
        }
    }
}
