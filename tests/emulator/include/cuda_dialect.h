// The part of CUDA C++ that the kernels use beside ptx.cuh, for a host compiler: launch geometry, shared memory,
// barriers, warp operations, integer atomics, vector types and intrinsics. Included before a .cu file.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "emulator_abi.h"

// ---- functions and variables ----

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Thread-local variables of a library form one block of memory, which the runner swaps when it changes blocks.
#define __shared__ static thread_local

// ---- launch geometry ----

#define threadIdx (emulator::current->thread_index)
#define blockIdx (emulator::current->block_index)
#define blockDim (emulator::current->block_dim)
#define gridDim (emulator::current->grid_dim)
constexpr int warpSize = 32;

// ---- vector types ----

#define EMULATOR_VECTOR2(name, scalar)            \
    struct alignas(2 * sizeof(scalar)) name {     \
        scalar x, y;                              \
    };                                            \
    inline name make_##name(scalar x, scalar y) { \
        return name{x, y};                        \
    }
#define EMULATOR_VECTOR3(name, scalar)                      \
    struct name {                                           \
        scalar x, y, z;                                     \
    };                                                      \
    inline name make_##name(scalar x, scalar y, scalar z) { \
        return name{x, y, z};                               \
    }
#define EMULATOR_VECTOR4(name, scalar)                                \
    struct alignas(4 * sizeof(scalar)) name {                         \
        scalar x, y, z, w;                                            \
    };                                                                \
    inline name make_##name(scalar x, scalar y, scalar z, scalar w) { \
        return name{x, y, z, w};                                      \
    }
EMULATOR_VECTOR2(ushort2, unsigned short)
EMULATOR_VECTOR2(int2, int)
EMULATOR_VECTOR2(uint2, unsigned)
EMULATOR_VECTOR2(float2, float)
EMULATOR_VECTOR2(longlong2, long long)
EMULATOR_VECTOR3(uint3, unsigned)
EMULATOR_VECTOR3(float3, float)
EMULATOR_VECTOR4(ushort4, unsigned short)
EMULATOR_VECTOR4(int4, int)
EMULATOR_VECTOR4(uint4, unsigned)
EMULATOR_VECTOR4(float4, float)
#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR3
#undef EMULATOR_VECTOR4

// ---- block barriers ----

#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_SITE) {
    emulator::block_barrier(0, file, line);
}
inline int __syncthreads_or(int predicate, EMULATOR_SITE) {
    return emulator::block_barrier(predicate, file, line).any;
}
inline int __syncthreads_and(int predicate, EMULATOR_SITE) {
    return emulator::block_barrier(predicate, file, line).all;
}
inline int __syncthreads_count(int predicate, EMULATOR_SITE) {
    return emulator::block_barrier(predicate, file, line).count;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- warp operations ----

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
    emulator::warp_meet(mask, emulator::WarpOp::sync, 0, file, line);
}

namespace emulator {

// The value of the source lane; `inside` is the hardware's test that the source lies in the segment.
template <class T>
inline T shuffle(unsigned mask, T value, int source, bool inside, const char* file, int line) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const uint64_t* lanes = warp_meet(mask, WarpOp::shuffle, bits, file, line);
    if (!inside) return value;
    if (source < 0 || source > 31 || !(mask >> source & 1))
        fail("shuffle", "lane %u reads lane %d, which is not in mask %08x (%s:%d)", current->lane, source, mask, file,
             line);
    std::memcpy(&value, &lanes[source], sizeof(T));
    return value;
}

inline void check_width(int width, const char* file, int line) {
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail("shuffle", "width %d is not a power of two up to 32 (%s:%d)", width, file, line);
}

}  // namespace emulator

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
    emulator::check_width(width, file, line);
    const int lane = static_cast<int>(emulator::current->lane);
    return emulator::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), true, file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, EMULATOR_SITE) {
    emulator::check_width(width, file, line);
    const int lane = static_cast<int>(emulator::current->lane);
    const int source = lane ^ distance;
    return emulator::shuffle(mask, value, source, source <= (lane | (width - 1)), file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, EMULATOR_SITE) {
    emulator::check_width(width, file, line);
    const int lane = static_cast<int>(emulator::current->lane);
    const int source = lane - static_cast<int>(distance);
    return emulator::shuffle(mask, value, source, source >= (lane & ~(width - 1)), file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, EMULATOR_SITE) {
    emulator::check_width(width, file, line);
    const int lane = static_cast<int>(emulator::current->lane);
    const int source = lane + static_cast<int>(distance);
    return emulator::shuffle(mask, value, source, source <= (lane | (width - 1)), file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    const uint64_t* lanes = emulator::warp_meet(mask, emulator::WarpOp::ballot, predicate != 0, file, line);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(lanes[i]) << i;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    const uint64_t* lanes = emulator::warp_meet(mask, emulator::WarpOp::any, predicate != 0, file, line);
    for (int i = 0; i < 32; ++i)
        if (lanes[i]) return 1;
    return 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    const uint64_t* lanes = emulator::warp_meet(mask, emulator::WarpOp::all, predicate != 0, file, line);
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1) && !lanes[i]) return 0;
    return 1;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_SITE) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const uint64_t* lanes = emulator::warp_meet(mask, emulator::WarpOp::match_any, bits, file, line);
    unsigned equal = 0;
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1) && lanes[i] == bits) equal |= 1u << i;
    return equal;
}

#define EMULATOR_REDUCE(name, scalar, op, expression)                                                  \
    inline scalar name(unsigned mask, scalar value, EMULATOR_SITE) {                                   \
        const uint64_t* lanes =                                                                        \
            emulator::warp_meet(mask, emulator::WarpOp::op, static_cast<unsigned>(value), file, line); \
        bool first = true;                                                                             \
        scalar a = 0;                                                                                  \
        for (int i = 0; i < 32; ++i) {                                                                 \
            if (!(mask >> i & 1)) continue;                                                            \
            const scalar b = static_cast<scalar>(static_cast<unsigned>(lanes[i]));                     \
            a = first ? b : static_cast<scalar>(expression);                                           \
            first = false;                                                                             \
        }                                                                                              \
        return a;                                                                                      \
    }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, reduce_add, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, reduce_add, static_cast<unsigned>(a) + static_cast<unsigned>(b))
EMULATOR_REDUCE(__reduce_min_sync, unsigned, reduce_min, a < b ? a : b)
EMULATOR_REDUCE(__reduce_min_sync, int, reduce_min, a < b ? a : b)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, reduce_max, a > b ? a : b)
EMULATOR_REDUCE(__reduce_max_sync, int, reduce_max, a > b ? a : b)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, reduce_or, a | b)
#undef EMULATOR_REDUCE

// ---- integer atomics ----

#define EMULATOR_ATOMIC(name, scalar, op)                                                                      \
    inline scalar name(scalar* address, scalar value) {                                                        \
        return static_cast<scalar>(emulator::atomic(address, sizeof(scalar), std::is_signed_v<scalar>,         \
                                                    emulator::AtomicOp::op, static_cast<uint64_t>(value), 0)); \
    }
#define EMULATOR_ATOMICS(name, op)      \
    EMULATOR_ATOMIC(name, int, op)      \
    EMULATOR_ATOMIC(name, unsigned, op) \
    EMULATOR_ATOMIC(name, unsigned long long, op)
EMULATOR_ATOMICS(atomicAdd, add)
EMULATOR_ATOMICS(atomicMin, min)
EMULATOR_ATOMICS(atomicMax, max)
EMULATOR_ATOMICS(atomicAnd, bit_and)
EMULATOR_ATOMICS(atomicOr, bit_or)
EMULATOR_ATOMICS(atomicExch, exchange)
#undef EMULATOR_ATOMICS
#undef EMULATOR_ATOMIC

template <class T>
inline T atomicCAS(T* address, T compare, T value) {
    return static_cast<T>(emulator::atomic(address, sizeof(T), false, emulator::AtomicOp::compare_exchange,
                                           static_cast<uint64_t>(value), static_cast<uint64_t>(compare)));
}

// ---- intrinsics ----

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __int_as_float(int bits) {
    return __uint_as_float(static_cast<unsigned>(bits));
}
inline int __float_as_int(float x) {
    return static_cast<int>(__float_as_uint(x));
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
// Rounded one by one: never contracted into a fused multiply-add.
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
// Rounded down: what the sum to nearest is too large by is a float itself.
inline float __fadd_rd(float a, float b) {
    const float sum = a + b, of_b = sum - a;
    const float error = (a - (sum - of_b)) + (b - of_b);
    return error < 0.0f ? nextafterf(sum, -INFINITY) : sum;
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
[[noreturn]] inline void __trap() {
    emulator::fail("trap", "the kernel called __trap");
}

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- entry points ----

namespace emulator {

template <auto Kernel>
struct Invoker;

template <class... A, void (*Kernel)(A...)>
struct Invoker<Kernel> {
    static constexpr unsigned sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
    template <size_t... I>
    static void call(void* const* arguments, std::index_sequence<I...>) {
        Kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
    }
    static void invoke(void* const* arguments) {
        call(arguments, std::index_sequence_for<A...>{});
    }
    static constexpr Entry entry(const char* name) {
        return Entry{name, &invoke, static_cast<int>(sizeof...(A)), sizes};
    }
};

}  // namespace emulator
