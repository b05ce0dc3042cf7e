// What the kernels of Phase-1 backward share: sums that keep their rounding errors, counts of a chunk's entries.
#pragma once

#include "entries.cuh"

// Entries of the slots that a chunk writes (or reads): those up to the last slot's end.
template <class Slot>
static __device__ __forceinline__ int entries_of(const Slot* slots, int count) {
    return count > 0 ? slots[count - 1].first + slots[count - 1].count : 0;
}

// What was added, in the order it was: `sum` rounded after each term, `error` what that rounding dropped. No
// operation is contracted, so the same terms in the same order give the same bits wherever they are compiled.
struct CompensatedSum {
    float sum, error;

    __device__ __forceinline__ void add(float x) {
        const float next = __fadd_rn(sum, x);
        const float taken = __fsub_rn(next, sum);  // of x
        const float dropped = __fadd_rn(__fsub_rn(sum, __fsub_rn(next, taken)), __fsub_rn(x, taken));
        error = __fadd_rn(error, dropped);
        sum = next;
    }
    __device__ __forceinline__ void add(CompensatedSum other) {
        add(other.sum);
        error = __fadd_rn(error, other.error);
    }
    // A sum that is inf has an error of NaN.
    __device__ __forceinline__ float total() const {
        return error == error ? __fadd_rn(sum, error) : sum;
    }
};

static __device__ __forceinline__ CompensatedSum empty_sum() {
    return CompensatedSum{0.0f, 0.0f};
}
static __device__ __forceinline__ CompensatedSum operator-(CompensatedSum a) {
    return CompensatedSum{-a.sum, -a.error};
}
