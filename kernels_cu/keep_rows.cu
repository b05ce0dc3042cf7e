// Keeps what the rows of chunks' slots held as fp8 or int4: one scale a row. A stepwise step reads them in the bank,
// before it changes them; the walk of a persistent forward has put them into walk_rows.
//
// Macros  BANK (float, Bf16, Fp16), VECTOR (bank values of one load), SNAPSHOT (3 fp8, 4 int4).
// Grid    (blocks of WARPS slots, chunks from those of `step` on: P, or all of a walk).
// Block   32 * WARPS threads: a slot a warp, which walks through its row.
// Reads   rows of memory [P*S, D] (row_stride values apart), or walk_rows [chunks of the walk, capacity, D] where it is
//         not null; slots [chunks, capacity], slot_count [chunks] of the slab; capacity = min(C W, S).
// Writes  snapshot [all chunks, capacity, D], row j for slot j (fp8: bytes; int4: [.., ceil(D / 2)] bytes, the even
//         column in the low half); snapshot_scale [all chunks, capacity].
// Shared  none.
#include "chunk.cuh"
#include "entries.cuh"
#include "snapshot.cuh"

#define WARPS 8
#define LOADS 4  // words of a thread under way at once
#define SLICE (32 * VECTOR * LOADS)

using BankWord = Word<BANK, VECTOR>;

// The words of this thread in a slice of a row.
struct Words {
    BankWord word[LOADS];

    __device__ __forceinline__ void load(const BANK* row, int column, int D) {
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int at = column + l * 32 * VECTOR;
            word[l] = BankWord{};
            if (at < D) word[l] = ptx::load_global(reinterpret_cast<const BankWord*>(row + at));
        }
    }
};

// Magnitudes compare as their bits do, NaN above infinity.
static __device__ __forceinline__ unsigned magnitude_bits(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}
static __device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Calls visit(word's first column, its values) for every word of this thread in the row.
template <class Visit>
static __device__ __forceinline__ void visit_row(const BANK* row, Words& held, int first, int D, const Visit& visit) {
    for (int slice = 0; slice < D; slice += SLICE) {
        if (D > SLICE) held.load(row, slice + first, D);
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int at = slice + first + l * 32 * VECTOR;
            if (at >= D) continue;
            float value[VECTOR];
            unpack_pairs<BANK, VECTOR>(held.word[l], value);
            visit(at, value);
        }
    }
}

// Stores N bytes, a power of two, at an address that is a multiple of N.
template <int N>
static __device__ __forceinline__ void store_bytes(unsigned char* p, const unsigned char (&bytes)[N]) {
    if constexpr (N == 1) {
        *p = bytes[0];
    } else {
        typename WordOf<N>::type word;
        memcpy(&word, bytes, N);
        ptx::store_global(reinterpret_cast<typename WordOf<N>::type*>(p), word);
    }
}

// Keeps the row as fp8 or int4. `held` holds the row's first slice.
static __device__ __forceinline__ void quantize_row(const BANK* row, Words& held, int first, int D, unsigned char* out,
                                                    float* scale_out) {
    unsigned largest_bits = 0;
    visit_row(row, held, first, D, [&](int, const float (&value)[VECTOR]) {
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) largest_bits = max(largest_bits, magnitude_bits(value[c]));
    });
    const float largest = __uint_as_float(warp_max(largest_bits));
#if SNAPSHOT == 3
    float scale = row_scale(largest, 448.0f);
    if (scale == 0.0f) scale = 1.0f;
    const float inverse = 1.0f / scale;
    visit_row(row, held, first, D, [&](int at, const float (&value)[VECTOR]) {
        unsigned char bytes[VECTOR];
#if VECTOR > 1
#pragma unroll
        for (int c = 0; c < VECTOR; c += 2) {
            const unsigned short pair = fp8x2_from_floats(value[c] * inverse, value[c + 1] * inverse);
            memcpy(bytes + c, &pair, 2);
        }
#else
        bytes[0] = static_cast<unsigned char>(fp8x2_from_floats(value[0] * inverse, 0.0f));
#endif
        store_bytes(out + at, bytes);
    });
#else
    // Of two clips the one with the smaller squared error: a wide row loses less by clipping its largest values.
    const float whole = row_scale(largest, 7.5f), clipped = row_scale(largest, 7.5f / 0.8f);
    const float inverse_whole = whole == 0.0f ? 0.0f : 1.0f / whole;
    const float inverse_clipped = clipped == 0.0f ? 0.0f : 1.0f / clipped;
    float error_whole = 0.0f, error_clipped = 0.0f;
    visit_row(row, held, first, D, [&](int, const float (&value)[VECTOR]) {
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) {
            // At most 7.5 and a rounding of the scale: nothing to clamp.
            const float a = (int4_level(value[c] * inverse_whole) + 0.5f) * whole - value[c];
            const float b = (int4_level(int4_clamp(value[c] * inverse_clipped)) + 0.5f) * clipped - value[c];
            error_whole = fmaf(a, a, error_whole);
            error_clipped = fmaf(b, b, error_clipped);
        }
    });
    const bool clips = warp_sum(error_clipped) < warp_sum(error_whole);
    const float scale = clips ? clipped : whole, inverse = clips ? inverse_clipped : inverse_whole;
    visit_row(row, held, first, D, [&](int at, const float (&value)[VECTOR]) {
#if VECTOR > 1
        unsigned word = 0;
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) word |= int4_code(int4_clamp(value[c] * inverse)) << 4 * c;
        unsigned char bytes[VECTOR / 2];
        memcpy(bytes, &word, sizeof(bytes));
        store_bytes(out + at / 2, bytes);
#else
        // Lanes of even columns write a byte; beyond the row its high half is level 0.
        if (at % 2) return;
        const float next = at + 1 < D ? to_float(row[at + 1]) : 0.0f;
        const unsigned low = int4_code(int4_clamp(value[0] * inverse)), high = int4_code(int4_clamp(next * inverse));
        out[at / 2] = static_cast<unsigned char>(low | high << 4);
#endif
    });
#endif
    if (threadIdx.x % 32 == 0) *scale_out = scale;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    keep_rows(const BANK* memory, const BANK* walk_rows, const SlotRecord* slots, const int* slot_count,
              unsigned char* snapshot, float* snapshot_scale, long long row_stride, int step, int slab_step,
              int slab_chunks, int P, int T, int C, int W, int S, int D, int shared_bank) {
    const int chunk = blockIdx.y, j = blockIdx.x * WARPS + threadIdx.x / 32, first = threadIdx.x % 32 * VECTOR;
    const long long n = static_cast<long long>(step - slab_step) * P + chunk;
    const long long capacity = min(static_cast<long long>(C) * W, static_cast<long long>(S));
    if (n >= chunks_of_slab(slab_step, slab_chunks, P, T, C) || j >= slot_count[n]) return;
    const BANK* row;
    if (walk_rows == nullptr) {
        const long long first_slot = shared_bank ? 0 : static_cast<long long>(chunk) * S;
        row = memory + (first_slot + slots[n * capacity + j].slot) * row_stride;
    } else {
        row = walk_rows + (chunk * capacity + j) * D;
    }
    const long long kept = (static_cast<long long>(step) * P + chunk) * capacity + j;
    const long long bytes = SNAPSHOT == 3 ? D : (D + 1) / 2;
    Words held;
    held.load(row, first, D);
    quantize_row(row, held, first, D, snapshot + kept * bytes, snapshot_scale + kept);
}
