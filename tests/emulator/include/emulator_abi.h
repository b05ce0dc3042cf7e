// What compiled kernels and the emulator's runner see of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Extent {
    unsigned x, y, z;
};

// The running thread's place in its launch.
struct Thread {
    Extent thread_index, block_index, block_dim, grid_dim;
    unsigned cluster_rank, cluster_size;
    unsigned lane;
};

// Set by the scheduler before a fiber resumes.
extern Thread* current;

enum class WarpOp : int { sync, shuffle, ballot, any, all, match_any, reduce_add, reduce_min, reduce_max, reduce_or };
enum class AtomicOp : int { add, min, max, bit_and, bit_or, exchange, compare_exchange };

// Ends the process with a report that names the running thread.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// __syncthreads and its reductions: returns {any, all, count} of the predicate over the block.
struct BlockVote {
    int any, all, count;
};
BlockVote block_barrier(int predicate, const char* file, int line);

// Meets the lanes of `mask`; returns the values of the 32 lanes (those outside the mask are 0).
const uint64_t* warp_meet(unsigned mask, WarpOp op, uint64_t value, const char* file, int line);

uint64_t atomic(void* address, int bytes, bool is_signed, AtomicOp op, uint64_t value, uint64_t compare);

void* dynamic_shared();
void pdl_wait();
void pdl_trigger();

// Checks that this launch writes nothing there, and that the address is aligned to `bytes`.
void readonly_access(const void* address, size_t bytes);
void check_aligned(const void* address, size_t bytes);

void copy_async(void* shared, const void* global, size_t bytes);
void copy_commit();
void copy_wait(int pending);

void cluster_arrive(const char* file, int line);
void cluster_wait(const char* file, int line);
void* map_shared(void* address, unsigned rank);
void mbarrier_init(uint64_t* barrier, unsigned arrivals);
void mbarrier_arrive(uint64_t* barrier, unsigned rank);
void mbarrier_wait(uint64_t* barrier, unsigned parity, const char* file, int line);

// One extern "C" kernel of a library.
struct Entry {
    const char* name;
    void (*invoke)(void* const* arguments);
    int argument_count;
    const unsigned* argument_sizes;
};

}  // namespace emulator
