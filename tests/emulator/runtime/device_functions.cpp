// The functions that kernels see.
#include <algorithm>

#include "scheduler.h"

namespace emulator {

BlockVote block_barrier(int predicate, const char* file, int line) {
    return scheduler.block_barrier(predicate, file, line);
}
const uint64_t* warp_meet(unsigned mask, WarpOp op, uint64_t value, const char* file, int line) {
    return scheduler.warp_meet(mask, op, value, file, line);
}
void cluster_arrive(const char* file, int line) {
    scheduler.cluster_arrive(file, line);
}
void cluster_wait(const char* file, int line) {
    scheduler.cluster_wait(file, line);
}
void* map_shared(void* address, unsigned rank) {
    return scheduler.map_shared(address, rank);
}
void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
    scheduler.mbarrier_init(barrier, arrivals);
}
void mbarrier_arrive(uint64_t* barrier, unsigned rank) {
    scheduler.mbarrier_arrive(barrier, rank);
}
void mbarrier_wait(uint64_t* barrier, unsigned parity, const char* file, int line) {
    scheduler.mbarrier_wait(barrier, parity, file, line);
}
void copy_async(void* shared, const void* global, size_t bytes) {
    scheduler.copy_async(shared, global, bytes);
}
void copy_commit() {
    scheduler.copy_commit();
}
void copy_wait(int pending) {
    scheduler.copy_wait(pending);
}
void pdl_wait() {
    scheduler.pdl_wait();
}
void pdl_trigger() {
    scheduler.pdl_trigger();
}
void* dynamic_shared() {
    return scheduler.dynamic_shared();
}
void check_aligned(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes)
        fail("alignment", "accesses %zu bytes at an address that is not a multiple of %zu", bytes, bytes);
}
void readonly_access(const void* address, size_t bytes) {
    check_aligned(address, bytes);
    memory.check_readonly(address, bytes);
}

namespace {

template <class T>
uint64_t apply(T* address, AtomicOp op, T value, T compare) {
    const T old = *address;
    switch (op) {
        case AtomicOp::add:
            *address = static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(value));
            break;
        case AtomicOp::min:
            *address = std::min(old, value);
            break;
        case AtomicOp::max:
            *address = std::max(old, value);
            break;
        case AtomicOp::bit_and:
            *address = old & value;
            break;
        case AtomicOp::bit_or:
            *address = old | value;
            break;
        case AtomicOp::exchange:
            *address = value;
            break;
        case AtomicOp::compare_exchange:
            if (old == compare) *address = value;
            break;
    }
    return static_cast<uint64_t>(old);
}

}  // namespace

uint64_t atomic(void* address, int bytes, bool is_signed, AtomicOp op, uint64_t value, uint64_t compare) {
    check_aligned(address, static_cast<size_t>(bytes));
    memory.access(address, static_cast<size_t>(bytes), Access::atomic, __builtin_return_address(0));
    if (bytes == 8) return apply(static_cast<uint64_t*>(address), op, value, compare);
    if (is_signed)
        return apply(static_cast<int32_t*>(address), op, static_cast<int32_t>(value), static_cast<int32_t>(compare));
    return apply(static_cast<uint32_t*>(address), op, static_cast<uint32_t>(value), static_cast<uint32_t>(compare));
}

}  // namespace emulator
