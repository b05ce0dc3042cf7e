// Product-key top-k: the best min(K, S) slots of a row of factor scores, and the gradient of their scores.
//
// Slot (c_0 .. c_{F-1}) scores the float32 sum of its factor scores in factor order. Scores compare as float32 with -0
// below +0 and NaN as -inf. Each factor is ranked by value, larger column first on ties. Stage f combines the ranks
// i of the stage before with the ranks j of factor f, over the pairs with (i+1)(j+1) <= c alone, c = min(K, n m), equal
// sums going to the larger i + j, then the larger i. Bf16 partial sums of more than two factors are rounded between
// stages. Selected slots come in rising order.
//
// One warp owns a row. Every choice is made on a 64-bit key without equals, (ordered score, tie rank): a radix select
// finds the least key that is still in, a bitonic sort orders what was selected.
//
// Macros  SCORE (float, Bf16, Fp16), FACTORS (the widths, comma separated), K (1..256).
// Grid    blocks share the rows, WARPS at a time.
// Block   32 * WARPS threads.
// Shared  static.
#include "numeric.cuh"

#define WARPS 4
#define FULL 0xffffffffu

static __device__ constexpr int widths[] = {FACTORS};
static constexpr int num_factors = sizeof(widths) / sizeof(int);

static __device__ constexpr int least(long long a, long long b) {
    return static_cast<int>(a < b ? a : b);
}
// Slots of the first `count` factors together that a stage keeps, at most K.
static __device__ constexpr int kept(int count) {
    long long product = 1;
    for (int f = 0; f < count; ++f) product = least(product * widths[f], K);
    return static_cast<int>(product);
}
static __device__ constexpr int raw_width() {
    int sum = 0;
    for (int f = 0; f < num_factors; ++f) sum += widths[f];
    return sum;
}
static constexpr int selected = kept(num_factors);
static __device__ constexpr int power_of_two(int x) {
    int power = 1;
    while (power < x) power *= 2;
    return power;
}
static constexpr int sort_size = power_of_two(least(K, raw_width() > K ? K : raw_width() > selected ? raw_width() : selected));

// The pairs of stage f: ranks i < n of the stage before, j < m of the factor.
static __device__ constexpr int stage_pairs(int f) {
    const int n = kept(f), m = least(K, widths[f]), c = kept(f + 1);
    int count = 0;
    for (int i = 0; i < n; ++i) count += least(m, c / (i + 1));
    return count;
}
static __device__ constexpr int total_pairs() {
    int count = 0;
    for (int f = 1; f < num_factors; ++f) count += stage_pairs(f);
    return count > 0 ? count : 1;
}
struct Pairs {
    unsigned char i[total_pairs()];
    unsigned char j[total_pairs()];
};
static __device__ constexpr Pairs all_pairs() {
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
static __device__ const Pairs pairs = all_pairs();

template <class T>
struct IsBf16 {
    static constexpr bool value = false;
};
template <>
struct IsBf16<Bf16> {
    static constexpr bool value = true;
};
static constexpr bool rounds_partial_sums = IsBf16<SCORE>::value && num_factors > 2;

using Key = unsigned long long;

// Rises with the score; NaN as -inf.
static __device__ __forceinline__ unsigned ordered(float score) {
    const unsigned bits = score != score ? 0xff800000u : __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What a warp works in.
struct Scratch {
    int histogram[256];
    Key keys[sort_size];
    float total[selected];      // of the stage before, best first
    long long slot[selected];   // its slots, in the factors so far
    float score[least(K, raw_width())];  // of the factor, best first
    int column[least(K, raw_width())];
    float next_total[selected];
    long long next_slot[selected];
};

// Puts the `want` largest of the `count` keys key(0) .. key(count - 1) into scratch.keys, largest first.
template <class KeyOf>
static __device__ __forceinline__ void select_sorted(Scratch& scratch, int count, int want, const KeyOf& key) {
    const int lane = threadIdx.x % 32;
    Key prefix = 0;   // keys whose upper bits equal it are undecided, larger ones are in
    int shift = 64, missing = want;
    while (shift > 0 && missing > 0) {
        shift -= 8;
        for (int bin = lane; bin < 256; bin += 32) scratch.histogram[bin] = 0;
        __syncwarp();
        for (int e = lane; e < count; e += 32) {
            const Key x = key(e);
            if (shift == 56 || x >> (shift + 8) == prefix) atomicAdd(scratch.histogram + (x >> shift & 255), 1);
        }
        __syncwarp();
        // Lane l holds bins 255 - 8 l downwards; the bin where the count from above reaches `missing` goes on.
        int mine[8], sum = 0;
#pragma unroll
        for (int b = 0; b < 8; ++b) sum += mine[b] = scratch.histogram[255 - 8 * lane - b];
        int inclusive = sum;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int left = __shfl_up_sync(FULL, inclusive, distance);
            if (lane >= distance) inclusive += left;
        }
        int above = inclusive - sum, bin = -1, taken = 0, size = 0;
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            if (bin < 0 && above + mine[b] >= missing && above < missing) bin = 255 - 8 * lane - b, taken = above, size = mine[b];
            above += mine[b];
        }
        const int owner = __ffs(__ballot_sync(FULL, bin >= 0)) - 1;
        bin = __shfl_sync(FULL, bin, owner);
        missing -= __shfl_sync(FULL, taken, owner);
        size = __shfl_sync(FULL, size, owner);
        prefix = prefix << 8 | static_cast<unsigned>(bin);
        if (size == missing) missing = 0;  // the whole bin is in
        __syncwarp();
    }
    int placed = 0;
    for (int base = 0; base < count; base += 32) {
        const int e = base + lane;
        const Key x = e < count ? key(e) : 0;
        const bool in = e < count && x >> shift >= prefix;
        const unsigned votes = __ballot_sync(FULL, in);
        if (in) scratch.keys[placed + __popc(votes & ((1u << lane) - 1))] = x;
        placed += __popc(votes);
    }
    const int size = power_of_two(want);
    for (int e = want + lane; e < size; e += 32) scratch.keys[e] = 0;
    __syncwarp();
    for (int run = 2; run <= size; run *= 2)
        for (int distance = run / 2; distance > 0; distance /= 2) {
            for (int pair = lane; pair < size / 2; pair += 32) {
                const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
                const Key a = scratch.keys[low], b = scratch.keys[high];
                if ((a < b) == ((low & run) == 0)) scratch.keys[low] = b, scratch.keys[high] = a;
            }
            __syncwarp();
        }
}

// Reads   raw [rows, sum of widths].
// Writes  val [rows, min(K, S)] in the format of raw, idx [rows, min(K, S)].
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    topk(const SCORE* raw, SCORE* val, long long* idx, long long rows) {
    __shared__ Scratch scratches[WARPS];
    Scratch& scratch = scratches[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    for (long long row = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32; row < rows;
         row += gridDim.x * static_cast<long long>(WARPS)) {
        const SCORE* factor = raw + row * raw_width();
        int first_pair = 0;
        for (int f = 0; f < num_factors; ++f) {
            const int width = widths[f], m = least(K, width);
            select_sorted(scratch, width, m, [&](int column) {
                return static_cast<Key>(ordered(to_float(factor[column]))) << 32 | static_cast<unsigned>(column);
            });
            for (int j = lane; j < m; j += 32) {
                const int column = static_cast<int>(scratch.keys[j] & 0xffffffffu);
                (f == 0 ? scratch.total : scratch.score)[j] = to_float(factor[column]);
                if (f == 0)
                    scratch.slot[j] = column;
                else
                    scratch.column[j] = column;
            }
            __syncwarp();
            factor += width;
            if (f == 0) continue;
            const int count = stage_pairs(f), c = kept(f + 1);
            const unsigned char* const pair_i = pairs.i + first_pair;
            const unsigned char* const pair_j = pairs.j + first_pair;
            first_pair += count;
            select_sorted(scratch, count, c, [&](int e) {
                const int i = pair_i[e], j = pair_j[e];
                return static_cast<Key>(ordered(scratch.total[i] + scratch.score[j])) << 32 |
                       static_cast<unsigned>((i + j) << 8 | i);
            });
            for (int r = lane; r < c; r += 32) {
                const int tie = static_cast<int>(scratch.keys[r] & 0xffffffffu);
                const int i = tie & 255, j = (tie >> 8) - i;
                float total = scratch.total[i] + scratch.score[j];
                if (rounds_partial_sums && f + 1 < num_factors) total = round_to<SCORE>(total);
                scratch.next_total[r] = total;
                scratch.next_slot[r] = scratch.slot[i] * width + scratch.column[j];
            }
            __syncwarp();
            for (int r = lane; r < c; r += 32) {
                scratch.total[r] = scratch.next_total[r];
                scratch.slot[r] = scratch.next_slot[r];
            }
            __syncwarp();
        }
        // Rising slots: the largest of the complements first.
        select_sorted(scratch, selected, selected,
                      [&](int r) { return static_cast<Key>(0x7fffffffll - scratch.slot[r]) << 32 | static_cast<unsigned>(r) + 1; });
        for (int r = lane; r < selected; r += 32) {
            const int rank = static_cast<int>(scratch.keys[r] & 0xffffffffu) - 1;
            val[row * selected + r] = from_float<SCORE>(scratch.total[rank]);
            idx[row * selected + r] = scratch.slot[rank];
        }
        __syncwarp();
    }
}

// Gradient of the scores: grad_raw[column of factor f] = sum of grad_val over the selected slots with that column, in
// rising order of slots, in float32.
//
// Grid    blocks share the rows.
// Block   any multiple of 32 threads.
// Reads   idx, grad_val [rows, min(K, S)].
// Writes  grad_raw [rows, sum of widths], all of it.
extern "C" __global__ void topk_backward(const long long* idx, const SCORE* grad_val, SCORE* grad_raw, long long rows) {
    __shared__ int column_of[num_factors][selected];
    __shared__ float grad[selected];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        for (int r = threadIdx.x; r < selected; r += blockDim.x) {
            long long slot = idx[row * selected + r];
            grad[r] = to_float(grad_val[row * selected + r]);
            for (int f = num_factors - 1; f >= 0; --f) {
                column_of[f][r] = static_cast<int>(slot % widths[f]);
                slot /= widths[f];
            }
        }
        __syncthreads();
        int first = 0;
        for (int f = 0; f < num_factors; ++f) {
            for (int column = threadIdx.x; column < widths[f]; column += blockDim.x) {
                float sum = 0.0f;
                for (int r = 0; r < selected; ++r)
                    if (column_of[f][r] == column) sum += grad[r];
                grad_raw[row * raw_width() + first + column] = from_float<SCORE>(sum);
            }
            first += widths[f];
        }
        __syncthreads();
    }
}
