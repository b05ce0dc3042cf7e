// Product-key top-k: the best min(K, S) slots of a row of factor scores, and the gradient of those scores.
//
// Slot (c_0 .. c_{F-1}) scores the float32 sum of its factor scores in factor order. Scores compare as float32 with -0
// below +0 and NaN as -inf. Each factor is ranked by value, larger column first on ties. Stage f combines the ranks
// i of the stage before with the ranks j of factor f, over the pairs with (i+1)(j+1) <= c alone, c = min(K, n m), equal
// sums going to the larger i + j, then the larger i. Bf16 partial sums of more than two factors are rounded between
// stages. Selected slots come in rising order.
//
// One warp owns a row. Every choice is made on keys that never tie, (ordered score, tie rank): a radix select finds
// the least key that is still in, a bitonic sort orders what was selected.
//
// Macros  SCORE (float, Bf16, Fp16), FACTORS (the widths, comma separated; S, their product, below 2^31), K (1..256).
// Grid    blocks share the rows, WARPS at a time.
// Block   32 * WARPS threads.
// Shared  static, a Scratch a warp.
#include "numeric.cuh"

#define WARPS 4
#define BLOCKS 4  // on an SM at least: the registers of every variant are planned by it
#define FULL 0xffffffffu

static __device__ constexpr int widths[] = {FACTORS};
static constexpr int num_factors = sizeof(widths) / sizeof(int);

static __device__ constexpr int least(long long a, long long b) {
    return static_cast<int>(a < b ? a : b);
}
static __device__ constexpr long long row_width() {
    long long sum = 0;
    for (int f = 0; f < num_factors; ++f) sum += widths[f];
    return sum;
}
static __device__ constexpr int widest_factor() {
    int widest = 0;
    for (int f = 0; f < num_factors; ++f) widest = widths[f] > widest ? widths[f] : widest;
    return widest;
}
// Slots that the factors from `first` on span.
static __device__ constexpr long long slots_from(int first) {
    long long product = 1;
    for (int f = first; f < num_factors; ++f) product *= widths[f];
    return product;
}
// Slots that the first `count` factors together keep, at most K.
static __device__ constexpr int kept(int count) {
    long long product = 1;
    for (int f = 0; f < count; ++f) product = least(product * widths[f], K);
    return static_cast<int>(product);
}
static constexpr int selected = kept(num_factors);
static constexpr long long num_slots = slots_from(0);
static_assert(num_slots < 1ll << 31, "slots are 31-bit numbers");

// Keys of a lane in a sort; key e of lane l has place 32 e + l.
static __device__ constexpr int keys_a_lane() {
    int keys = 1;
    while (32 * keys < selected) keys *= 2;
    return keys;
}
static constexpr int lane_keys = keys_a_lane();

// ---- the pairs (i, j) of each stage ----

static __device__ constexpr int pairs_of_stage(int f) {
    const int n = kept(f), m = least(K, widths[f]), c = kept(f + 1);
    int count = 0;
    for (int i = 0; i < n; ++i) count += least(m, c / (i + 1));
    return count;
}
static __device__ constexpr int pairs_of_all_stages() {
    int count = 0;
    for (int f = 1; f < num_factors; ++f) count += pairs_of_stage(f);
    return count > 0 ? count : 1;
}
struct Pairs {
    unsigned char i[pairs_of_all_stages()];
    unsigned char j[pairs_of_all_stages()];
};
static __device__ constexpr Pairs list_pairs() {
    Pairs pairs{};
    int at = 0;
    for (int f = 1; f < num_factors; ++f) {
        const int n = kept(f), m = least(K, widths[f]), c = kept(f + 1);
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < least(m, c / (i + 1)); ++j) {
                pairs.i[at] = static_cast<unsigned char>(i);
                pairs.j[at++] = static_cast<unsigned char>(j);
            }
    }
    return pairs;
}
static __device__ const Pairs pairs = list_pairs();

// ---- keys ----

// Unsigned integers that hold `Bits` bits.
template <bool Wide>
struct KeyType {
    using type = unsigned;
};
template <>
struct KeyType<true> {
    using type = unsigned long long;
};
template <int Bits>
using Key = typename KeyType<(Bits > 32)>::type;

template <class T>
struct IsBf16 {
    static constexpr bool value = false;
};
template <>
struct IsBf16<Bf16> {
    static constexpr bool value = true;
};

// The bits of a score as an integer that rises with it; NaN as -inf.
template <class T>
static __device__ __forceinline__ unsigned ordered(T x) {
    constexpr bool wide = sizeof(T) == 4;
    constexpr unsigned sign = wide ? 0x80000000u : 0x8000u, all = sign | (sign - 1);
    constexpr unsigned infinity = wide ? 0x7f800000u : IsBf16<T>::value ? 0x7f80u : 0x7c00u;
    unsigned bits = 0;
    memcpy(&bits, &x, sizeof(T));
    if ((bits & ~sign) > infinity) bits = sign | infinity;
    return bits & sign ? ~bits & all : bits | sign;
}

// Ranks of a factor: score, then column.
static constexpr int column_bits = widest_factor() <= 1 << 8 ? 8
    : widest_factor() <= 1 << 16                             ? 16
    : widest_factor() <= 1 << 24                             ? 24
                                                             : 32;
static constexpr int factor_bits = 8 * sizeof(SCORE) + column_bits;
// Ranks of a stage: sum, then i + j <= 255, then i.
static constexpr int stage_bits = 32 + 16;
// Order of the output: rising slot, with the place it is selected at.
static constexpr int slot_bits = (num_slots <= 1 << 24 ? 24 : 32) + 8;

static constexpr bool rounds_partial_sums = IsBf16<SCORE>::value && num_factors > 2;

// What a warp works in.
struct __align__(16) Scratch {
    int histogram[256];  // 0 between uses
    __align__(8) unsigned char keys[8 * selected];
    float total[selected];  // of the stage before, best first
    unsigned slot[selected];
    float score[selected];  // of the factor, best first
    int column[selected];
};

// Hands out the `want` largest of the keys key(0) .. key(count - 1), in no order; places beyond them get 0.
template <int Bits, class KeyOf>
static __device__ __forceinline__ void select_largest(Scratch& scratch, unsigned count, unsigned want, const KeyOf& key,
                                                      Key<Bits> (&mine)[lane_keys]) {
    const int lane = threadIdx.x % 32;
    Key<Bits> prefix = 0;  // of the upper bits; keys above it are in, keys of it are undecided
    int shift = 0;
    if (want < count) {
        shift = Bits;
        int missing = static_cast<int>(want);  // keys of the prefix that are in
        int size;                              // keys of the prefix
        do {
            shift -= 8;
            for (unsigned e = lane; e < count; e += 32) {
                const Key<Bits> x = key(e);
                if (x >> shift >> 8 == prefix) atomicAdd(scratch.histogram + (x >> shift & 255), 1);
            }
            __syncwarp();
            // Lane l holds bins 255 - 8 l downwards; the bin where the count from above reaches `missing` goes on.
            int4* const bins = reinterpret_cast<int4*>(scratch.histogram + 248 - 8 * lane);
            const int4 low = bins[0], high = bins[1];
            bins[0] = bins[1] = make_int4(0, 0, 0, 0);
            __syncwarp();
            const int held[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
            int sum = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) sum += held[b];
            int inclusive = sum;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int left = __shfl_up_sync(FULL, inclusive, distance);
                if (lane >= distance) inclusive += left;
            }
            const int owner = __ffs(__ballot_sync(FULL, inclusive >= missing)) - 1;
            int above = inclusive - sum, bin = 0, in_bin = 0, over = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                if (above < missing) bin = 255 - 8 * lane - b, in_bin = held[b], over = above;
                above += held[b];
            }
            bin = __shfl_sync(FULL, bin, owner);
            size = __shfl_sync(FULL, in_bin, owner);
            missing -= __shfl_sync(FULL, over, owner);
            prefix = prefix << 8 | static_cast<unsigned>(bin);
        } while (size != missing);
    }
    Key<Bits>* const keys = reinterpret_cast<Key<Bits>*>(scratch.keys);
    int placed = 0;
    for (unsigned base = 0; base < count; base += 32) {
        const unsigned e = base + lane;
        const Key<Bits> x = e < count ? key(e) : 0;
        const bool in = e < count && x >> shift >= prefix;
        const unsigned votes = __ballot_sync(FULL, in);
        if (in) keys[placed + __popc(votes & ((1u << lane) - 1))] = x;
        placed += __popc(votes);
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < lane_keys; ++e) {
        const unsigned place = 32 * e + lane;
        mine[e] = place < want ? keys[place] : 0;
    }
    __syncwarp();
}

// Sorts the keys of the warp, largest first.
template <class T>
static __device__ __forceinline__ void sort_falling(T (&keys)[lane_keys]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int run = 2; run <= 32 * lane_keys; run *= 2) {
#pragma unroll
        for (int distance = run / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) {
                const bool falling = ((32 * e + lane) & run) == 0;
                if (distance >= 32) {
                    const int other = e | distance / 32;
                    if (e == other) continue;
                    const T a = keys[e], b = keys[other];
                    if ((a < b) == falling) keys[e] = b, keys[other] = a;
                } else {
                    const T x = keys[e], other = __shfl_xor_sync(FULL, x, distance);
                    const bool keeps_larger = ((lane & distance) == 0) == falling;
                    if ((x < other) == keeps_larger) keys[e] = other;
                }
            }
        }
    }
}

// Reads   raw [rows, sum of widths].
// Writes  val [rows, min(K, S)] in the format of raw, idx [rows, min(K, S)].
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    topk(const SCORE* raw, SCORE* val, long long* idx, long long rows) {
    __shared__ Scratch scratches[WARPS];
    Scratch& scratch = scratches[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    for (int bin = lane; bin < 256; bin += 32) scratch.histogram[bin] = 0;
    __syncwarp();
    for (long long row = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32; row < rows;
         row += gridDim.x * static_cast<long long>(WARPS)) {
        const SCORE* factor = raw + row * row_width();
        const unsigned char* pair_i = pairs.i;
        const unsigned char* pair_j = pairs.j;
        // Of the stage, place 32 e + lane; best first until the last one.
        float total[lane_keys];
        unsigned slot[lane_keys];
        for (int f = 0; f < num_factors; ++f) {
            const int width = widths[f], m = least(K, width);
            Key<factor_bits> ranks[lane_keys];
            select_largest<factor_bits>(
                scratch, width, m,
                [&](unsigned column) {
                    return static_cast<Key<factor_bits>>(ordered(factor[column])) << column_bits | column;
                },
                ranks);
            if (num_factors > 1) sort_falling(ranks);
            if (f > 0) {
#pragma unroll
                for (int e = 0; e < lane_keys; ++e) {
                    const int place = 32 * e + lane;
                    if (place < kept(f)) {
                        scratch.total[place] = total[e];
                        scratch.slot[place] = slot[e];
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) {
                const int place = 32 * e + lane;
                if (place >= m) continue;
                const unsigned column = ranks[e] & (~0u >> (32 - column_bits));
                const float score = to_float(factor[column]);
                if (f == 0) {
                    total[e] = score;
                    slot[e] = column;
                } else {
                    scratch.score[place] = score;
                    scratch.column[place] = column;
                }
            }
            factor += width;
            if (f == 0) continue;
            __syncwarp();
            const int count = pairs_of_stage(f), c = kept(f + 1);
            Key<stage_bits> best[lane_keys];
            select_largest<stage_bits>(
                scratch, count, c,
                [&](unsigned e) {
                    const unsigned i = pair_i[e], j = pair_j[e];
                    const float sum = ptx::add_unflushed(scratch.total[i], scratch.score[j]);
                    return static_cast<Key<stage_bits>>(ordered(sum)) << 16 | (i + j) << 8 | i;
                },
                best);
            if (f + 1 < num_factors) sort_falling(best);
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) {
                if (32 * e + lane >= c) continue;
                const unsigned tie = static_cast<unsigned>(best[e]), i = tie & 255, j = (tie >> 8 & 255) - i;
                total[e] = ptx::add_unflushed(scratch.total[i], scratch.score[j]);
                if (rounds_partial_sums && f + 1 < num_factors) total[e] = round_to<SCORE>(total[e]);
                slot[e] = scratch.slot[i] * width + scratch.column[j];
            }
            __syncwarp();
            pair_i += count;
            pair_j += count;
        }
        Key<slot_bits> order[lane_keys];
#pragma unroll
        for (int e = 0; e < lane_keys; ++e) {
            const int place = 32 * e + lane;
            order[e] = 0;
            if (place >= selected) continue;
            scratch.total[place] = total[e];
            order[e] = static_cast<Key<slot_bits>>(num_slots - 1 - slot[e]) << 8 | place;
        }
        sort_falling(order);
        __syncwarp();
#pragma unroll
        for (int e = 0; e < lane_keys; ++e) {
            const int place = 32 * e + lane;
            if (place >= selected) continue;
            val[row * selected + place] = from_float<SCORE>(scratch.total[order[e] & 255]);
            idx[row * selected + place] = num_slots - 1 - static_cast<long long>(order[e] >> 8);
        }
        __syncwarp();
    }
}

// Gradient of the scores: grad_raw[column of factor f] = sum of grad_val over the selected slots with that column, in
// rising order of slots, in float32. One warp owns a row.
//
// Grid    blocks share the rows, WARPS at a time.
// Block   32 * WARPS threads.
// Reads   idx, grad_val [rows, min(K, S)].
// Writes  grad_raw [rows, sum of widths], all of it.
// Shared  static.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    topk_backward(const long long* idx, const SCORE* grad_val, SCORE* grad_raw, long long rows) {
    __shared__ float grads[WARPS][selected];
    __shared__ unsigned columns[WARPS][selected];
    float* const grad = grads[threadIdx.x / 32];
    unsigned* const column = columns[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    for (long long row = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32; row < rows;
         row += gridDim.x * static_cast<long long>(WARPS)) {
        unsigned slot[lane_keys];
#pragma unroll
        for (int e = 0; e < lane_keys; ++e) {
            const int place = 32 * e + lane;
            if (place >= selected) continue;
            slot[e] = static_cast<unsigned>(idx[row * selected + place]);
            grad[place] = to_float(grad_val[row * selected + place]);
        }
        SCORE* out = grad_raw + row * row_width();
#pragma unroll
        for (int f = 0; f < num_factors; ++f) {
            const unsigned width = widths[f], stride = static_cast<unsigned>(slots_from(f + 1));
            for (unsigned c = lane; c < width; c += 32) out[c] = from_float<SCORE>(0.0f);
#pragma unroll
            for (int e = 0; e < lane_keys; ++e)
                if (32 * e + lane < selected) column[32 * e + lane] = slot[e] / stride % width;
            __syncwarp();
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) {
                const int place = 32 * e + lane;
                if (place >= selected) continue;
                const unsigned mine = column[place];
                bool first = true;
                float sum = 0.0f;
                for (int other = 0; other < selected; ++other)
                    if (column[other] == mine) {
                        first &= other >= place;
                        sum = ptx::add_unflushed(sum, grad[other]);
                    }
                if (first) out[mine] = from_float<SCORE>(sum);
            }
            __syncwarp();
            out += width;
        }
    }
}
