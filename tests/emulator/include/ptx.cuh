// The second implementation of kernels_cu/ptx.cuh: the same functions on the emulator.
#pragma once

#include "cuda_dialect.h"

namespace ptx {

// ---- launch ----

// Whether the kernel was specified with -DSDM_PDL_WAIT=1 and -DSDM_PDL_TRIGGER=1 comes with the launch, so that both
// variants are one library.
inline void pdl_wait() {
    emulator::pdl_wait();
}
inline void pdl_trigger() {
    emulator::pdl_trigger();
}
inline void prefetch_l2_if(bool, const void*) {}
template <class T>
inline T* dynamic_shared() {
    return static_cast<T*>(emulator::dynamic_shared());
}

// ---- global memory ----

template <class T>
inline T load_readonly(const T* p) {
    emulator::readonly_access(p, sizeof(T));
    return *p;
}
inline unsigned load_readonly_extended(const unsigned short* p) {
    return load_readonly(p);
}
struct Eviction {};
inline Eviction evict_first() {
    return {};
}
inline Eviction evict_normal() {
    return {};
}
template <class T>
inline T load_global(const T* p, Eviction = {}) {
    emulator::check_aligned(p, sizeof(T));
    return *p;
}
template <class T>
inline void load_global_if(bool needed, const T* p, T& x) {
    if (needed) x = load_global(p);
}
template <class T>
inline void store_global(T* p, const T& x, Eviction = {}) {
    emulator::check_aligned(p, sizeof(T));
    *p = x;
}

// ---- asynchronous copies, global to shared ----

inline void copy_async_16(void* shared, const void* global, Eviction = {}) {
    emulator::copy_async(shared, global, 16);
}
inline void copy_async_8(void* shared, const void* global, Eviction = {}) {
    emulator::copy_async(shared, global, 8);
}
inline void copy_async_4(void* shared, const void* global, Eviction = {}) {
    emulator::copy_async(shared, global, 4);
}
inline void copy_commit() {
    emulator::copy_commit();
}
template <int Pending>
inline void copy_wait() {
    emulator::copy_wait(Pending);
}

// ---- clusters ----

inline unsigned cluster_rank() {
    return emulator::current->cluster_rank;
}
inline unsigned cluster_size() {
    return emulator::current->cluster_size;
}
inline void cluster_arrive(EMULATOR_SITE) {
    emulator::cluster_arrive(file, line);
}
inline void cluster_wait(EMULATOR_SITE) {
    emulator::cluster_wait(file, line);
}
template <class T>
inline T* map_shared(T* pointer, unsigned rank) {
    return static_cast<T*>(emulator::map_shared(pointer, rank));
}

// ---- mbarrier ----

inline void mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
    emulator::mbarrier_init(reinterpret_cast<uint64_t*>(barrier), arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(unsigned long long* barrier, unsigned rank) {
    emulator::mbarrier_arrive(reinterpret_cast<uint64_t*>(barrier), rank);
}
inline void mbarrier_wait(unsigned long long* barrier, unsigned parity, EMULATOR_SITE) {
    emulator::mbarrier_wait(reinterpret_cast<uint64_t*>(barrier), parity, file, line);
}

// ---- arithmetic ----

inline void idle(long long) {}

// x as a double, where a subnormal number counts.
inline double unflushed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (bits & 0x7f800000u) return x;
    return std::copysign(static_cast<double>(bits & 0x7fffffu) * 0x1p-149, bits >> 31 ? -1.0 : 1.0);
}
// Rounding a double sum of two floats to float gives their float sum; below the normal range it is exact.
inline float add_unflushed(float a, float b) {
    const double sum = unflushed(a) + unflushed(b);
    if (!(std::fabs(sum) < 0x1p-126)) return static_cast<float>(sum);
    const uint32_t bits = static_cast<uint32_t>(std::fabs(sum) * 0x1p149) | (std::signbit(sum) ? 0x80000000u : 0u);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// ---- registers ----

inline void renew(int&) {}
inline void renew(unsigned&) {}
template <class T>
inline void renew(T*&) {}

// ---- conversions, to nearest even ----

inline unsigned short bf16_from_float(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline unsigned short fp16_from_float(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    const unsigned sign = bits >> 16 & 0x8000u;
    const unsigned magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
    unsigned half;
    if (magnitude >= 0x38800000u) {
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    } else {
        // A multiple of 2^-24: shift the mantissa into place, to nearest even.
        const unsigned shift = 126u - (magnitude >> 23);
        if (shift > 24) return static_cast<unsigned short>(sign);
        const unsigned mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const unsigned half_unit = 1u << (shift - 1);
        half = (mantissa + half_unit - 1 + (mantissa >> shift & 1)) >> shift;
    }
    return static_cast<unsigned short>(sign | half);
}

inline float fp16_to_float(unsigned short half) {
    const unsigned sign = (half & 0x8000u) << 16;
    const unsigned exponent = half >> 10 & 31u;
    const unsigned mantissa = half & 0x3ffu;
    unsigned bits;
    if (exponent == 31) {
        bits = mantissa ? 0x7fffffffu : sign | 0x7f800000u;
    } else if (exponent) {
        bits = sign | (exponent + 112u) << 23 | mantissa << 13;
    } else {
        // Subnormal: mantissa * 2^-24 is exact in float32.
        const float x = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &x, 4);
        bits |= sign;
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline unsigned bf16x2_from_floats(float low, float high) {
    return bf16_from_float(low) | static_cast<unsigned>(bf16_from_float(high)) << 16;
}
inline unsigned fp16x2_from_floats(float low, float high) {
    return fp16_from_float(low) | static_cast<unsigned>(fp16_from_float(high)) << 16;
}

}  // namespace ptx
