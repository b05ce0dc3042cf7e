// Sums of log-decays in fixed point: exact, so their order never matters and differences lose nothing.
#pragma once

#include "numeric.cuh"

// A sum of gates: finite ones in units of 2^-38, gates of -inf (erasures) and NaN counted beside it. A gate beyond
// +-65536 counts as that: its exponential is 0 or overflows either way. 256 gates stay within 63 bits.
struct LogDecay {
    long long fixed;
    int erasures;
    int nans;
};

static __device__ __forceinline__ LogDecay no_decay() {
    return LogDecay{0, 0, 0};
}
static __device__ __forceinline__ LogDecay gate_decay(float g) {
    if (g != g) return LogDecay{0, 0, 1};
    if (g < -3.4e38f) return LogDecay{0, 1, 0};
    return LogDecay{llrintf(fminf(fmaxf(g, -65536.0f), 65536.0f) * 274877906944.0f), 0, 0};
}
static __device__ __forceinline__ LogDecay operator+(LogDecay a, LogDecay b) {
    return LogDecay{a.fixed + b.fixed, a.erasures + b.erasures, a.nans + b.nans};
}
static __device__ __forceinline__ LogDecay operator-(LogDecay a, LogDecay b) {
    return LogDecay{a.fixed - b.fixed, a.erasures - b.erasures, a.nans - b.nans};
}

// The sum as one float.
static __device__ __forceinline__ float log_of(LogDecay x) {
    if (x.nans != 0) return __uint_as_float(0x7fc00000u);
    if (x.erasures != 0) return __uint_as_float(0xff800000u);
    return static_cast<float>(x.fixed) * 3.637978807091713e-12f;
}

// exp of the sum: 0 across an erasure. The float nearest to the sum is exponentiated, the rest enters to first order.
static __device__ __forceinline__ float exp_of(LogDecay x) {
    if (x.nans != 0) return __uint_as_float(0x7fc00000u);
    if (x.erasures != 0) return 0.0f;
    const float nearest = static_cast<float>(x.fixed);
    const float rest = static_cast<float>(x.fixed - static_cast<long long>(nearest));
    const float e = exp_decay(nearest * 3.637978807091713e-12f);
    return fmaf(e, rest * 3.637978807091713e-12f, e);
}
