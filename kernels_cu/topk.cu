// Product-key top-k: the best min(K, S) slots of a row of factor scores, and the gradient of those scores.
//
// Slot (c_0 .. c_{F-1}) scores the float32 sum of its factor scores in factor order. Scores compare as float32 with -0
// below +0 and NaN as -inf. Each factor is ranked by value, larger column first on ties. Stage f combines the ranks
// i of the stage before with the ranks j of factor f, over the pairs with (i+1)(j+1) <= c alone, c = min(K, n m), equal
// sums going to the larger i + j, then the larger i. Bf16 partial sums of more than two factors are rounded between
// stages. Selected slots come in rising order.
//
// One warp owns a row. A radix select finds the least score that is still in, digit by digit from the first bit on that
// differs; of equal ones the last are in, so columns lie in rising order, and pairs in that of (i + j, i). A bitonic sort
// orders what was selected, on keys that never tie.
//
// Macros  SCORE (float, Bf16, Fp16), FACTORS (the widths, comma separated; S, their product, below 2^31), K (1..256).
// Grid    blocks share the rows, WARPS at a time.
// Block   32 * WARPS threads.
// Shared  static, a Scratch a warp.
#include "numeric.cuh"

#define WARPS 4
#define HELD 24                   // values that a lane holds at most
#define BLOCKS (K <= 64 ? 8 : 4)  // on an SM at least: the registers of every variant are planned by it
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
static __device__ constexpr int most_pairs() {
    int most = 0;
    for (int f = 1; f < num_factors; ++f) most = pairs_of_stage(f) > most ? pairs_of_stage(f) : most;
    return most > 0 ? most : 1;
}
// What a stage reads of its factor, computed here: in the kernel a factor is a number of the running program.
struct Stage {
    int width, ranks;  // of the factor; of them the best that count
    int before, kept;  // slots of the stage before and of this one
    int pairs;
};
struct Stages {
    Stage stage[num_factors];
};
static __device__ constexpr Stages list_stages() {
    Stages stages{};
    for (int f = 0; f < num_factors; ++f)
        stages.stage[f] = Stage{widths[f], least(K, widths[f]), kept(f), kept(f + 1), f > 0 ? pairs_of_stage(f) : 0};
    return stages;
}
static __constant__ const Stages stages = list_stages();

struct Pairs {
    unsigned short pair[pairs_of_all_stages()];  // i | j << 8
};
static __device__ constexpr Pairs list_pairs() {
    Pairs pairs{};
    int at = 0;
    for (int f = 1; f < num_factors; ++f) {
        const int n = kept(f), m = least(K, widths[f]), c = kept(f + 1);
        for (int sum = 0; sum < c; ++sum)
            for (int i = 0; i <= sum; ++i)
                if (const int j = sum - i; i < n && j < m && (i + 1) * (j + 1) <= c)
                    pairs.pair[at++] = static_cast<unsigned short>(i | j << 8);
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
// Ranks of a stage: sum, then place in the list of pairs.
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

// The values of a warp, value_of(0) .. value_of(count - 1), at most `Most`: held by the lanes where these have registers
// for them, else computed whenever they are looked at. Lanes beyond the last one look at that again, without a branch.
template <int Most, class ValueOf>
struct Values {
    static constexpr int rounds = (Most + 31) / 32;
    static constexpr bool held = rounds <= HELD;
    const ValueOf& value_of;
    const int count;
    unsigned mine[held ? rounds : 1];

    __device__ __forceinline__ Values(const ValueOf& value_of, int count) : value_of(value_of), count(count) {
        if constexpr (held) {
#pragma unroll
            for (int round = 0; round < rounds; ++round)
                mine[round] = value_of(min(32 * round + static_cast<int>(threadIdx.x) % 32, count - 1));
        }
    }
    // Calls visit(value, place, whether there is one) 32 at a time, the last ones first.
    template <class Visit>
    __device__ __forceinline__ void visit(const Visit& visit) const {
        if constexpr (held) {
#pragma unroll
            for (int round = rounds - 1; round >= 0; --round) {
                const int e = 32 * round + threadIdx.x % 32;
                visit(mine[round], e, e < count);
            }
        } else {
            for (int round = (count - 1) / 32; round >= 0; --round) {
                const int e = 32 * round + threadIdx.x % 32;
                visit(value_of(min(e, count - 1)), e, e < count);
            }
        }
    }
};

// Calls pick(n, e, value) for the `want` largest of value_of(0) .. value_of(count - 1), of equal ones the last; n is a
// number below `want` of its own for each.
template <int Most, class ValueOf, class Pick>
static __device__ __forceinline__ void select_largest(Scratch& scratch, int count, int want, const ValueOf& value_of,
                                                      const Pick& pick) {
    const Values<Most, ValueOf> values(value_of, count);
    const int lane = threadIdx.x % 32;
    unsigned known = 0, least = 0;     // the bits that are decided, and those of the least value that is in
    int missing = want, size = count;  // values of these bits: that are in, all
    if (want < count) {
        const unsigned any = value_of(0);
        unsigned differing = 0;
        values.visit([&](unsigned value, int, bool) { differing |= value ^ any; });
        differing = __reduce_or_sync(FULL, differing);
        int undecided = 32 - __clz(static_cast<int>(differing));  // bits
        known = undecided < 32 ? ~0u << undecided : 0;
        least = any & known;
        while (size != missing && (differing & ~known) != 0) {
            const int shift = max(undecided - 8, 0);
            values.visit([&](unsigned value, int, bool is_value) {
                if (is_value && (value & known) == least) atomicAdd(scratch.histogram + (value >> shift & 255), 1);
            });
            __syncwarp();
            // Lane l holds bins 255 - 8 l downwards; the bin where the count from above reaches `missing` goes on.
            int4* const bins = reinterpret_cast<int4*>(scratch.histogram + 248 - 8 * lane);
            const int4 low = bins[0], high = bins[1];
            bins[0] = bins[1] = make_int4(0, 0, 0, 0);
            __syncwarp();
            const int in_bins[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
            int sum = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) sum += in_bins[b];
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
                if (above < missing) bin = 255 - 8 * lane - b, in_bin = in_bins[b], over = above;
                above += in_bins[b];
            }
            least |= static_cast<unsigned>(__shfl_sync(FULL, bin, owner)) << shift;
            size = __shfl_sync(FULL, in_bin, owner);
            missing -= __shfl_sync(FULL, over, owner);
            known = ~0u << shift;
            undecided = shift;
        }
    }
    const bool has_ties = size != missing;
    int picked = 0, ties = 0;
    values.visit([&](unsigned value, int e, bool is_value) {
        bool is_in = is_value && value >= least;
        if (has_ties) {
            const bool is_tie = is_in && (value & known) == least;
            const unsigned tied = __ballot_sync(FULL, is_tie);
            is_in = is_in && (!is_tie || ties + __popc(tied & ~1u << lane) < missing);
            ties += __popc(tied);
        }
        const unsigned votes = __ballot_sync(FULL, is_in);
        if (is_in) pick(picked + __popc(votes & (1u << lane) - 1), e, value);
        picked += __popc(votes);
    });
    __syncwarp();
}

// Exchanges the keys of places that differ by `mask`, whose first bit is `top`: the lower place keeps the larger key.
template <class T>
static __device__ __forceinline__ void exchange(T (&keys)[lane_keys], int mask, int top) {
    const int lanes = mask % 32, words = mask / 32;
    T others[lane_keys];
#pragma unroll
    for (int e = 0; e < lane_keys; ++e)
        others[e] = lanes > 0 ? __shfl_xor_sync(FULL, keys[e ^ words], lanes) : keys[e ^ words];
#pragma unroll
    for (int e = 0; e < lane_keys; ++e) {
        const bool is_lower = ((32 * e + threadIdx.x % 32) & top) == 0;
        if ((keys[e] < others[e]) == is_lower) keys[e] = others[e];
    }
}

// Sorts the keys of the warp, largest first: runs that fall are merged, the second one taken backwards.
template <class T>
static __device__ __forceinline__ void sort_falling(T (&keys)[lane_keys]) {
#pragma unroll
    for (int run = 2; run <= 32 * lane_keys; run *= 2) {
        exchange(keys, run - 1, run / 2);
#pragma unroll
        for (int distance = run / 4; distance > 0; distance /= 2) exchange(keys, distance, distance);
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
        const unsigned short* pair = pairs.pair;
        // Of the stage, place 32 e + lane; best first until the last one.
        float total[lane_keys];
        unsigned slot[lane_keys];
#pragma unroll 1
        for (int f = 0; f < num_factors; ++f) {
            const Stage stage = stages.stage[f];
            const int width = stage.width, m = stage.ranks;
            Key<factor_bits> ranks[lane_keys];
            Key<factor_bits>* const columns = reinterpret_cast<Key<factor_bits>*>(scratch.keys);
            select_largest<widest_factor()>(
                scratch, width, m, [&](int column) { return ordered(factor[column]); },
                [&](int n, int column, unsigned value) {
                    columns[n] = static_cast<Key<factor_bits>>(value) << column_bits | column;
                });
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) ranks[e] = 32 * e + lane < m ? columns[32 * e + lane] : 0;
            __syncwarp();
            if (num_factors > 1) sort_falling(ranks);
            if (f > 0) {
#pragma unroll
                for (int e = 0; e < lane_keys; ++e) {
                    const int place = 32 * e + lane;
                    if (place < stage.before) {
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
            const int count = stage.pairs, c = stage.kept;
            Key<stage_bits> best[lane_keys];
            Key<stage_bits>* const sums = reinterpret_cast<Key<stage_bits>*>(scratch.keys);
            select_largest<most_pairs()>(
                scratch, count, c,
                [&](int e) {
                    const int i = pair[e] & 255, j = pair[e] >> 8;
                    return ordered(ptx::add_unflushed(scratch.total[i], scratch.score[j]));
                },
                [&](int n, int e, unsigned value) { sums[n] = static_cast<Key<stage_bits>>(value) << 16 | e; });
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) best[e] = 32 * e + lane < c ? sums[32 * e + lane] : 0;
            __syncwarp();
            if (f + 1 < num_factors) sort_falling(best);
#pragma unroll
            for (int e = 0; e < lane_keys; ++e) {
                if (32 * e + lane >= c) continue;
                const unsigned chosen = pair[best[e] & 0xffff], i = chosen & 255, j = chosen >> 8;
                total[e] = ptx::add_unflushed(scratch.total[i], scratch.score[j]);
                if (rounds_partial_sums && f + 1 < num_factors) total[e] = round_to<SCORE>(total[e]);
                slot[e] = scratch.slot[i] * width + scratch.column[j];
            }
            __syncwarp();
            pair += count;
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
