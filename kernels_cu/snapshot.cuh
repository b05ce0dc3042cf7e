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

// e4m3fn to nearest even; beyond +-448 the largest finite value. In integers, for targets that do not convert.
static __device__ __forceinline__ unsigned fp8_from_float(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    const float magnitude = fminf(fabsf(x), 448.0f);
    if (magnitude < 0.015625f)  // subnormal: multiples of 2^-9
        return sign | static_cast<unsigned>(rintf(magnitude * 512.0f));
    unsigned m = __float_as_uint(magnitude);
    m += 0x7ffffu + (m >> 20 & 1u);
    return sign | ((m >> 20) - (120u << 3));
}
// Two values, `low` in the low byte: the same bits on every target, except that a NaN, which no row with a scale other
// than NaN has, is some byte.
static __device__ __forceinline__ unsigned short fp8x2_from_floats(float low, float high) {
#if __CUDA_ARCH__ >= 890
    return ptx::e4m3x2_from_floats(low, high);
#else
    return static_cast<unsigned short>(fp8_from_float(low) | fp8_from_float(high) << 8);
#endif
}
// As half precision it is 2^-8 of itself, subnormal numbers too.
static __device__ __forceinline__ float fp8_to_float(unsigned bits) {
    return 256.0f * ptx::fp16_to_float(static_cast<unsigned short>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7));
}

// int4: a value in units of its row's scale, clamped to -8..7, has the level floor(value), which stands for level + 0.5,
// the middle of its step, and is stored as level + 8 in four bits.
static __device__ __forceinline__ float int4_clamp(float x) {
    return fminf(fmaxf(x, -8.0f), 7.0f);
}
// Floats between 2^23 and 2^24 are the integers: a sum with this one, rounded down, has level + 8 in its low four bits.
// floorf takes four times as long.
#define INT4_BIAS 12582920.0f
static __device__ __forceinline__ float int4_level(float x) {
    return __fadd_rd(x, INT4_BIAS) - INT4_BIAS;
}
static __device__ __forceinline__ unsigned int4_code(float x) {
    return __float_as_uint(__fadd_rd(x, INT4_BIAS)) & 15u;
}
