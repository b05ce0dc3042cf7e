// Quantized snapshot rows: fp8 (e4m3fn) and int4, one scale a row of bfloat16 precision.
#pragma once

#include "numeric.cuh"

// The scale that brings `largest` to `limit`, 0 for a row of zeros. A row with NaN or inf has no scale but NaN, and comes
// back as NaN.
static __device__ __forceinline__ float row_scale(float largest, float limit) {
    const float scale = round_to<Bf16>(largest / limit);
    if (!(largest < __uint_as_float(0x7f800000u))) return __uint_as_float(0x7fc00000u);
    return scale;
}

// e4m3fn to nearest even; beyond +-448 the largest finite value. In integers, since only sm_89 and later convert.
static __device__ __forceinline__ unsigned fp8_from_float(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    const float magnitude = fminf(fabsf(x), 448.0f);
    if (magnitude < 0.015625f)  // subnormal: multiples of 2^-9
        return sign | static_cast<unsigned>(rintf(magnitude * 512.0f));
    unsigned m = __float_as_uint(magnitude);
    m += 0x7ffffu + (m >> 20 & 1u);
    return sign | ((m >> 20) - (120u << 3));
}
// As half precision it is 2^-8 of itself, subnormal numbers too.
static __device__ __forceinline__ float fp8_to_float(unsigned bits) {
    return 256.0f * ptx::fp16_to_float(static_cast<unsigned short>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7));
}

// The level in -8..7 of a value in units of its row's scale, stored as level + 8 in four bits: it stands for level +
// 0.5, the middle of its step.
static __device__ __forceinline__ float int4_level(float x) {
    return fminf(fmaxf(floorf(x), -8.0f), 7.0f);
}
