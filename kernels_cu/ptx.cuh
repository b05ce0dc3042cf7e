// What the hardware provides through inline PTX, one short function each. No other file of kernels_cu holds inline
// PTX or declares dynamic shared memory, so a second implementation of this header runs the kernels elsewhere.
//
// Pointers to shared memory are generic pointers. Functions marked sm_90 fail to assemble for older targets; the two
// PDL functions compile to nothing there.
#pragma once

// -DSDM_PDL_WAIT=1: the kernel is launched as a programmatic dependent. -DSDM_PDL_TRIGGER=1: it lets its dependent
// start early.
#ifndef SDM_PDL_WAIT
#define SDM_PDL_WAIT 0
#endif
#ifndef SDM_PDL_TRIGGER
#define SDM_PDL_TRIGGER 0
#endif

namespace ptx {

// ---- launch ----

// Waits until every earlier grid that this one depends on has ended and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if SDM_PDL_WAIT && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent grid start once every block has called this or ended.
__device__ __forceinline__ void pdl_trigger() {
#if SDM_PDL_TRIGGER && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A hint that brings the line of `p` into L2. It reads no value, so it may stand before pdl_wait, where the launch
// before may still write there; a kernel that does not wait has no use for it.
__device__ __forceinline__ void prefetch_l2_if(bool needed, const void* p) {
#if SDM_PDL_WAIT && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .pred needed;\n\tsetp.ne.u32 needed, %1, 0;\n\t@needed prefetch.global.L2 [%0];\n\t}" ::"l"(p),
        "r"(static_cast<unsigned>(needed)));
#endif
}

// The launch's dynamic shared memory, aligned to 128 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- global memory ----

// Read-only path: for data that nothing writes while this grid runs. Volatile, so that no load moves above pdl_wait.
__device__ __forceinline__ unsigned short load_readonly(const unsigned short* p) {
    unsigned short x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}
// In the low half of a word, the high half being 0: nothing waits for the load to extend it.
__device__ __forceinline__ unsigned load_readonly_extended(const unsigned short* p) {
    unsigned x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ unsigned load_readonly(const unsigned* p) {
    unsigned x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ int load_readonly(const int* p) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ long long load_readonly(const long long* p) {
    long long x;
    asm volatile("ld.global.nc.s64 %0, [%1];" : "=l"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ float load_readonly(const float* p) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ uint2 load_readonly(const uint2* p) {
    uint2 x;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
__device__ __forceinline__ uint4 load_readonly(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// Past L1: for rows that are read once by this block.
__device__ __forceinline__ unsigned short load_global(const unsigned short* p) {
    unsigned short x;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ unsigned load_global(const unsigned* p) {
    unsigned x;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_global(const uint2* p) {
    uint2 x;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_global(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
// Leaves `x` as it is where it is not needed; no branch, so that loads after it do not wait for it.
__device__ __forceinline__ void load_global_if(bool needed, const unsigned short* p, unsigned short& x) {
    asm volatile("{\n\t.reg .pred needed;\n\tsetp.ne.u32 needed, %2, 0;\n\t@needed ld.global.cg.u16 %0, [%1];\n\t}"
                 : "+h"(x)
                 : "l"(p), "r"(static_cast<unsigned>(needed))
                 : "memory");
}
__device__ __forceinline__ void load_global_if(bool needed, const unsigned* p, unsigned& x) {
    asm volatile("{\n\t.reg .pred needed;\n\tsetp.ne.u32 needed, %2, 0;\n\t@needed ld.global.cg.u32 %0, [%1];\n\t}"
                 : "+r"(x)
                 : "l"(p), "r"(static_cast<unsigned>(needed))
                 : "memory");
}
__device__ __forceinline__ void load_global_if(bool needed, const uint4* p, uint4& x) {
    asm volatile(
        "{\n\t.reg .pred needed;\n\tsetp.ne.u32 needed, %5, 0;\n\t"
        "@needed ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(p), "r"(static_cast<unsigned>(needed))
        : "memory");
}
__device__ __forceinline__ void store_global(unsigned short* p, unsigned short x) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(x) : "memory");
}
__device__ __forceinline__ void store_global(unsigned* p, unsigned x) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void store_global(uint2* p, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void store_global(uint4* p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// In which order lines leave L2.
struct Eviction {
    unsigned long long policy;
};
__device__ __forceinline__ Eviction evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return Eviction{policy};
}
__device__ __forceinline__ Eviction evict_normal() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return Eviction{policy};
}
__device__ __forceinline__ unsigned short load_global(const unsigned short* p, Eviction eviction) {
    unsigned short x;
    asm volatile("ld.global.cg.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(x) : "l"(p), "l"(eviction.policy) : "memory");
    return x;
}
__device__ __forceinline__ unsigned load_global(const unsigned* p, Eviction eviction) {
    unsigned x;
    asm volatile("ld.global.cg.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x) : "l"(p), "l"(eviction.policy) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_global(const uint2* p, Eviction eviction) {
    uint2 x;
    asm volatile("ld.global.cg.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(p), "l"(eviction.policy)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_global(const uint4* p, Eviction eviction) {
    uint4 x;
    asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p), "l"(eviction.policy)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_global(unsigned short* p, unsigned short x, Eviction eviction) {
    asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;" ::"l"(p), "h"(x), "l"(eviction.policy) : "memory");
}
__device__ __forceinline__ void store_global(unsigned* p, unsigned x, Eviction eviction) {
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(x), "l"(eviction.policy) : "memory");
}
__device__ __forceinline__ void store_global(uint2* p, uint2 x, Eviction eviction) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(x.x), "r"(x.y),
                 "l"(eviction.policy)
                 : "memory");
}
__device__ __forceinline__ void store_global(uint4* p, uint4 x, Eviction eviction) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w), "l"(eviction.policy)
                 : "memory");
}

// ---- asynchronous copies, global to shared ----

// Copies 16 bytes; both addresses 16-byte aligned. Visible to this thread after copy_wait, to others after a barrier.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, Eviction eviction) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "l"(eviction.policy)
                 : "memory");
}
// Copies 8 bytes; both addresses 8-byte aligned.
__device__ __forceinline__ void copy_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_8(void* shared, const void* global, Eviction eviction) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "l"(eviction.policy)
                 : "memory");
}
// Copies 4 bytes; both addresses 4-byte aligned.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_4(void* shared, const void* global, Eviction eviction) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "l"(eviction.policy)
                 : "memory");
}
// Closes this thread's group of copies.
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Pending` of this thread's latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- clusters (sm_90) ----

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ unsigned cluster_size() {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
// Every thread of the cluster arrives once, then waits once; writes before an arrive are seen after the wait.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same variable of shared memory in the block of rank `rank`.
template <class T>
__device__ __forceinline__ T* map_shared(T* pointer, unsigned rank) {
    unsigned long long mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
    return reinterpret_cast<T*>(mapped);
}

// ---- mbarrier (sm_90: cluster scope) ----

// One thread sets the number of arrivals of a phase, then fences, then a barrier lets the others use it.
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives at the mbarrier of the block of rank `rank`; this thread's writes come before the arrival.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier, unsigned rank) {
    asm volatile(
        "{\n\t.reg .b32 remote;\n\t"
        "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n\t}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Waits for the end of the phase of parity `parity` (0 for the first) of this block's own mbarrier.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---- arithmetic ----

// a + b that keeps subnormal numbers, whatever -ftz says.
__device__ __forceinline__ float add_unflushed(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

// ---- registers ----

// x as it is, but what depends on it is computed after this point, not before and kept: for values of many phases.
__device__ __forceinline__ void renew(int& x) {
    asm volatile("" : "+r"(x));
}
__device__ __forceinline__ void renew(unsigned& x) {
    asm volatile("" : "+r"(x));
}
template <class T>
__device__ __forceinline__ void renew(T*& x) {
    asm volatile("" : "+l"(x));
}

// Returns after about this many cycles of the SM's clock.
__device__ __forceinline__ void idle(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

// ---- conversions, to nearest even ----

__device__ __forceinline__ unsigned short bf16_from_float(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ unsigned short fp16_from_float(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float fp16_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
// Two values in one word, `low` in the low half.
__device__ __forceinline__ unsigned bf16x2_from_floats(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ unsigned fp16x2_from_floats(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#if __CUDA_ARCH__ >= 890
// Two bytes; beyond +-448 the largest finite value, NaN as NaN.
__device__ __forceinline__ unsigned short e4m3x2_from_floats(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

}  // namespace ptx
