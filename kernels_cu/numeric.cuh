// Number formats of the bank, vectors of bank values, exponentials of log-decays, sums in a fixed order.
// Needs no CUDA header: the storage types are plain structs, every conversion rounds as the hardware does.
#pragma once

#include "ptx.cuh"

// ---- storage types of bank values ----

struct Bf16 {
    unsigned short bits;
};
struct Fp16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(Bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Fp16 x) {
    return ptx::fp16_to_float(x.bits);
}

// Conversions from float, to nearest even.
template <class T>
struct FromFloat;
template <>
struct FromFloat<float> {
    static __device__ __forceinline__ float one(float x) {
        return x;
    }
};
template <>
struct FromFloat<Bf16> {
    static __device__ __forceinline__ Bf16 one(float x) {
        return Bf16{ptx::bf16_from_float(x)};
    }
    static __device__ __forceinline__ unsigned two(float low, float high) {
        return ptx::bf16x2_from_floats(low, high);
    }
};
template <>
struct FromFloat<Fp16> {
    static __device__ __forceinline__ Fp16 one(float x) {
        return Fp16{ptx::fp16_from_float(x)};
    }
    static __device__ __forceinline__ unsigned two(float low, float high) {
        return ptx::fp16x2_from_floats(low, high);
    }
};

template <class T>
__device__ __forceinline__ T from_float(float x) {
    return FromFloat<T>::one(x);
}
// x as a value of the format T, in float.
template <class T>
__device__ __forceinline__ float round_to(float x) {
    return to_float(from_float<T>(x));
}

// ---- vectors of bank values ----

// The machine word of 2, 4, 8 or 16 bytes that one instruction loads or stores.
template <int Bytes>
struct WordOf;
template <>
struct WordOf<2> {
    using type = unsigned short;
};
template <>
struct WordOf<4> {
    using type = unsigned;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};
// The word that holds N values of type T.
template <class T, int N>
using Word = typename WordOf<static_cast<int>(sizeof(T)) * N>::type;

template <class T, int N>
__device__ __forceinline__ void unpack(const Word<T, N>& word, float (&x)[N]) {
    T values[N];
    memcpy(values, &word, sizeof(word));
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = to_float(values[i]);
}

// The values of a pair, the first in the low half.
__device__ __forceinline__ void to_floats(unsigned pair, float& low, float& high, Bf16) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void to_floats(unsigned pair, float& low, float& high, Fp16) {
    low = to_float(Fp16{static_cast<unsigned short>(pair)});
    high = to_float(Fp16{static_cast<unsigned short>(pair >> 16)});
}
// The same in fewer instructions, for loops that are bound by them.
template <class T, int N>
__device__ __forceinline__ void unpack_pairs(const Word<T, N>& word, float (&x)[N]) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        unsigned pairs[N / 2];
        memcpy(pairs, &word, sizeof(word));
#pragma unroll
        for (int i = 0; i < N / 2; ++i) to_floats(pairs[i], x[2 * i], x[2 * i + 1], T{});
    } else {
        unpack<T, N>(word, x);
    }
}

template <class T, int N>
__device__ __forceinline__ Word<T, N> pack(const float (&x)[N]) {
    Word<T, N> word;
    if constexpr (sizeof(T) == 2 && N > 1) {
        unsigned pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) pairs[i] = FromFloat<T>::two(x[2 * i], x[2 * i + 1]);
        memcpy(&word, pairs, sizeof(word));
    } else {
        T values[N];
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = from_float<T>(x[i]);
        memcpy(&word, values, sizeof(word));
    }
    return word;
}

// N consecutive values at `p`, which is aligned to the word.
template <int N, class T>
__device__ __forceinline__ void load_values(const T* p, float (&x)[N]) {
    unpack<T, N>(ptx::load_global(reinterpret_cast<const Word<T, N>*>(p)), x);
}
template <int N, class T>
__device__ __forceinline__ void load_values_readonly(const T* p, float (&x)[N]) {
    unpack<T, N>(ptx::load_readonly(reinterpret_cast<const Word<T, N>*>(p)), x);
}
template <int N, class T>
__device__ __forceinline__ void store_values(T* p, const float (&x)[N]) {
    ptx::store_global(reinterpret_cast<Word<T, N>*>(p), pack<T, N>(x));
}

// N consecutive floats at `p`, which is aligned to 16 bytes where N is a multiple of 4.
template <int N>
__device__ __forceinline__ void load_floats(const float* p, float (&x)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(p + i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = p[i];
    }
}
template <int N>
__device__ __forceinline__ void store_floats(float* p, const float (&x)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) p[i] = x[i];
    }
}

// ---- exponentials ----

// exp of a log-decay: exp(-inf) = 0, and a decay below the normal float32 range is 0, not a subnormal.
__device__ __forceinline__ float exp_decay(float x) {
    const float y = expf(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

// ---- sums in a fixed order ----

// The sum over groups of `Width` neighbouring lanes, the same bits in every lane of a group: a butterfly from the
// widest distance down. All 32 lanes take part.
template <int Width = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = Width / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
