// Threads as fibers: one cluster at a time, in a random order that a seed repeats.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "clock.h"
#include "emulator_abi.h"
#include "memory.h"

namespace emulator {

struct Block;

// The stack of a thread. Threads of later blocks and launches run on it in turn: its loop never returns.
struct Stack {
    char* begin = nullptr;
    void* pointer = nullptr;  // where it was left
    void* fake = nullptr;     // AddressSanitizer's
};

// Leaves the stack at hand, whose pointer goes to `left`, for the one that was left at `entered` (switch_stack.cpp).
extern "C" void emulator_switch_stack(void** left, void* entered);
void* first_frame(char* stack, size_t bytes, void (*entry)());

enum class Wait { none, block_barrier, warp, cluster_barrier, mbarrier };

struct PendingCopy {
    void* shared;
    const void* global;
    size_t bytes;
};

struct LaneValues {
    uint64_t of[32] = {};
};

struct Fiber : Thread {
    unsigned number = 0;  // in the cluster
    unsigned warp = 0;    // in the block
    Block* block = nullptr;
    bool ended = false;
    bool released = true;  // has passed griddepcontrol.wait, or needs none
    Wait waiting = Wait::none;
    const char* file = "";
    int line = 0;

    Clock clock;
    BlockVote vote{};
    std::shared_ptr<const LaneValues> lanes;  // of the latest warp operation
    unsigned cluster_barriers = 0;            // waits passed
    bool cluster_arrived = false;
    unsigned cluster_phase = 0;  // phase of the latest arrival
    Seen cluster_seen;           // by this thread at that arrival
    std::vector<std::vector<PendingCopy>> copy_groups;
    std::vector<PendingCopy> open_copies;

    Stack* stack = nullptr;
};

// Lanes that wait for each other at one warp operation.
struct Meeting {
    unsigned mask, arrived;
    WarpOp op;
    const char* file;
    int line;
    std::shared_ptr<LaneValues> values;
};

struct Block {
    int rank = 0;
    std::vector<Fiber*> fibers;
    std::vector<std::vector<Meeting>> meetings;  // of each warp
    unsigned arrived = 0, ended = 0;
    int any = 0, all = 1, count = 0;
    const char* file = "";
    int line = 0;
    bool waited_pdl = false;
    Region* dynamic = nullptr;
    Region* statics = nullptr;  // static shared memory while another block runs
};

struct Mbarrier {
    unsigned expected, pending, phase;
    JoinedClocks arriving;
    Seen completed;
    bool arriving_released = false, completed_released = false;
};

struct LaunchRequest {
    std::string entry;
    void (*invoke)(void* const*) = nullptr;
    std::vector<void*> arguments;
    Extent grid{}, block{}, cluster{};
    size_t shared_memory = 0;
    uint32_t on_the_way = 0;  // see Memory::begin_launch
    bool after_unknown = false;
    bool pdl = false, waits = false, triggers = false;  // launched with PDL; compiled with the wait, the trigger
    char* static_shared = nullptr;                      // the library's thread-local block
    size_t static_shared_bytes = 0;
};

struct LaunchCounts {
    uint64_t blocks = 0, barriers = 0, warp_operations = 0, pdl_waits = 0, pdl_triggers = 0, cluster_barriers = 0;
    size_t shared_touched = 0;
    uint32_t first_run = 0;
    bool triggers_early = false;  // a thread lets the dependent start before it has waited itself
};

class Scheduler {
  public:
    void seed(uint64_t value, int pattern);
    LaunchCounts run(const LaunchRequest& request);

    // Called by the running fiber.
    BlockVote block_barrier(int predicate, const char* file, int line);
    const uint64_t* warp_meet(unsigned mask, WarpOp op, uint64_t value, const char* file, int line);
    void cluster_arrive(const char* file, int line);
    void cluster_wait(const char* file, int line);
    void* map_shared(void* address, unsigned rank);
    void mbarrier_init(uint64_t* barrier, unsigned arrivals);
    void mbarrier_arrive(uint64_t* barrier, unsigned rank);
    void mbarrier_wait(uint64_t* barrier, unsigned parity, const char* file, int line);
    void copy_async(void* shared, const void* global, size_t bytes);
    void copy_commit();
    void copy_wait(int pending);
    void pdl_wait();
    void pdl_trigger();
    void* dynamic_shared();

    Fiber* running = nullptr;
    LaunchCounts counts;
    const LaunchRequest* request = nullptr;

    const void* canonical(const void* address) const;

  private:
    void run_cluster(Extent first_block);
    void resume(Fiber* fiber);
    void leave(Stack& stack);
    void suspend(Wait wait, const char* file, int line);
    void wake(Fiber* fiber);
    void switch_block(Block* block);
    void join(std::vector<Fiber*> const& fibers);
    void absorb(Fiber& fiber, const Seen& seen, bool released);
    void finish(Fiber& fiber);
    void complete_cluster_phase();
    [[noreturn]] void report_deadlock();
    void land(const PendingCopy& copy);
    Mbarrier& mbarrier_at(const void* address);
    static void trampoline();

    std::mt19937_64 random_;
    int pattern_ = 0;
    std::vector<Fiber> fibers_;
    std::vector<Block> blocks_;
    std::vector<Fiber*> runnable_;
    std::deque<Stack> stacks_;
    Block* loaded_ = nullptr;
    unsigned cluster_arrived_ = 0, cluster_phase_ = 0, live_ = 0;
    JoinedClocks cluster_arriving_;
    Seen cluster_completed_;
    bool cluster_arriving_released_ = false, cluster_completed_released_ = false;
    std::map<const void*, Mbarrier> mbarriers_;
    void* scheduler_pointer_ = nullptr;
    void* scheduler_fake_stack_ = nullptr;
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_stack_bytes_ = 0;
};

extern Scheduler scheduler;

inline Fiber* running() {
    return scheduler.running;
}
// Static shared memory has one address while its block runs; this is the address it has for all blocks.
inline const void* canonical_address(const void* address) {
    return scheduler.canonical(address);
}

[[noreturn]] void fail_at(const void* pc, const char* kind, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

}  // namespace emulator
