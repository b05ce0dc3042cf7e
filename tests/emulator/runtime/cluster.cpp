// Clusters, mbarriers and asynchronous copies.
#include <cstring>

#include "scheduler.h"

namespace emulator {

void Scheduler::complete_cluster_phase() {
    if (cluster_arrived_ == 0 || cluster_arrived_ < live_) return;
    ++counts.cluster_barriers;
    ++cluster_phase_;
    cluster_arrived_ = 0;
    cluster_completed_ = cluster_arriving_.seen();
    cluster_completed_released_ = cluster_arriving_released_;
    for (Fiber& fiber : fibers_)
        if (fiber.waiting == Wait::cluster_barrier) wake(&fiber);
}

void Scheduler::cluster_arrive(const char* file, int line) {
    Fiber& fiber = *running;
    if (fiber.cluster_arrived)
        fail("cluster", "arrives twice at the cluster barrier without a wait (%s:%d)", file, line);
    fiber.cluster_arrived = true;
    fiber.cluster_phase = cluster_phase_;
    cluster_arriving_released_ |= fiber.released;
    if (tracking) {
        cluster_arriving_.add(fiber.clock);
        fiber.cluster_seen = fiber.clock.seen;
        ++fiber.clock.own;
    }
    ++cluster_arrived_;
    complete_cluster_phase();
}

void Scheduler::cluster_wait(const char* file, int line) {
    Fiber& fiber = *running;
    if (!fiber.cluster_arrived)
        fail("cluster", "waits at the cluster barrier without having arrived (%s:%d)", file, line);
    if (cluster_phase_ == fiber.cluster_phase) suspend(Wait::cluster_barrier, file, line);
    // What a thread had seen when it arrived is part of what all had seen.
    if (fiber.clock.seen == fiber.cluster_seen) {
        fiber.clock.seen = cluster_completed_;
        fiber.released |= cluster_completed_released_;
    } else {
        absorb(fiber, cluster_completed_, cluster_completed_released_);
    }
    fiber.cluster_arrived = false;
    ++fiber.cluster_barriers;
}

void* Scheduler::map_shared(void* address, unsigned rank) {
    if (rank >= blocks_.size())
        fail("cluster", "maps shared memory of block %u of a cluster of %zu", rank, blocks_.size());
    const char* canonical_place = static_cast<const char*>(canonical(address));
    Block& own = *running->block;
    if (static_cast<int>(rank) == own.rank) return address;
    for (auto member : {&Block::dynamic, &Block::statics}) {
        Region* region = own.*member;
        if (canonical_place >= region->begin && canonical_place < region->begin + region->bytes)
            return (blocks_[rank].*member)->begin + (canonical_place - region->begin);
    }
    fail("cluster", "maps an address that is not in this block's shared memory");
}

// ---- mbarriers ----

Mbarrier& Scheduler::mbarrier_at(const void* address) {
    const auto found = mbarriers_.find(address);
    if (found == mbarriers_.end()) fail("mbarrier", "uses an mbarrier that nothing has initialized");
    return found->second;
}

void Scheduler::mbarrier_init(uint64_t* barrier, unsigned arrivals) {
    check_aligned(barrier, 8);
    memory.access(barrier, 8, Access::write, __builtin_return_address(0));
    Mbarrier made{arrivals, arrivals, 0, {}, {}, false, false};
    made.arriving.reset(fibers_.size());
    mbarriers_[canonical(barrier)] = made;
}

void Scheduler::mbarrier_arrive(uint64_t* barrier, unsigned rank) {
    void* remote = map_shared(barrier, rank);
    memory.access(remote, 8, Access::read, __builtin_return_address(0));
    Mbarrier& state = mbarrier_at(canonical(remote));
    Fiber& fiber = *running;
    state.arriving_released |= fiber.released;
    if (tracking) {
        state.arriving.add(fiber.clock);
        ++fiber.clock.own;
    }
    if (--state.pending == 0) {
        ++state.phase;
        state.pending = state.expected;
        state.completed = state.arriving.seen();
        state.completed_released = state.arriving_released;
        for (Fiber& other : fibers_)
            if (other.waiting == Wait::mbarrier) wake(&other);
    }
}

void Scheduler::mbarrier_wait(uint64_t* barrier, unsigned parity, const char* file, int line) {
    memory.access(barrier, 8, Access::read, __builtin_return_address(0));
    const void* place = canonical(barrier);
    while ((mbarrier_at(place).phase & 1) == (parity & 1)) suspend(Wait::mbarrier, file, line);
    const Mbarrier& state = mbarrier_at(place);
    if (state.phase > 0) absorb(*running, state.completed, state.completed_released);
}

// ---- asynchronous copies ----

void Scheduler::copy_async(void* shared, const void* global, size_t bytes) {
    check_aligned(shared, bytes);
    check_aligned(global, bytes);
    memory.access(global, bytes, Access::read, __builtin_return_address(0));
    memory.access(shared, bytes, Access::write, __builtin_return_address(0));
    memory.mark_unwritten(shared, bytes, pattern_);
    running->open_copies.push_back(PendingCopy{shared, global, bytes});
}

void Scheduler::land(const PendingCopy& copy) {
    memory.access(copy.global, copy.bytes, Access::read, __builtin_return_address(0));
    memory.access(copy.shared, copy.bytes, Access::write, __builtin_return_address(0));
    std::memcpy(copy.shared, copy.global, copy.bytes);
}

void Scheduler::copy_commit() {
    running->copy_groups.push_back(std::move(running->open_copies));
    running->open_copies.clear();
}

void Scheduler::copy_wait(int pending) {
    auto& groups = running->copy_groups;
    while (groups.size() > static_cast<size_t>(pending)) {
        for (const PendingCopy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

}  // namespace emulator
