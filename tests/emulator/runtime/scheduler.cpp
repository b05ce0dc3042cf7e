#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#define NOT_INSTRUMENTED __attribute__((no_sanitize("address"), noinline))

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#define START_SWITCH(save, stack, bytes) __sanitizer_start_switch_fiber(save, stack, bytes)
#define FINISH_SWITCH(saved, stack, bytes) __sanitizer_finish_switch_fiber(saved, stack, bytes)
#else
#define START_SWITCH(save, stack, bytes) ((void)(save), (void)(stack), (void)(bytes))
#define FINISH_SWITCH(saved, stack, bytes) ((void)(saved), (void)(stack), (void)(bytes))
#endif

namespace emulator {

Thread* current = nullptr;
Scheduler scheduler;

namespace {

constexpr size_t stack_bytes = 256 * 1024;

const char* wait_name(Wait wait) {
    switch (wait) {
        case Wait::block_barrier:
            return "__syncthreads";
        case Wait::warp:
            return "a warp operation";
        case Wait::cluster_barrier:
            return "the cluster barrier";
        case Wait::mbarrier:
            return "an mbarrier";
        default:
            return "nothing";
    }
}

// Shared memory is moved between blocks byte by byte, past the sanitizers.
NOT_INSTRUMENTED void move_bytes(char* to, const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) reinterpret_cast<volatile char*>(to)[i] = from[i];
}

}  // namespace

void Scheduler::seed(uint64_t value, int pattern) {
    random_.seed(value);
    pattern_ = pattern;
}

const void* Scheduler::canonical(const void* address) const {
    if (request == nullptr || loaded_ == nullptr) return address;
    const char* a = static_cast<const char*>(address);
    if (a >= request->static_shared && a < request->static_shared + request->static_shared_bytes)
        return loaded_->statics->begin + (a - request->static_shared);
    return address;
}

// ---- fibers ----

void Scheduler::trampoline() {
    FINISH_SWITCH(nullptr, &scheduler.scheduler_stack_, &scheduler.scheduler_stack_bytes_);
    for (;;) {
        scheduler.request->invoke(scheduler.request->arguments.data());
        scheduler.finish(*scheduler.running);
        scheduler.leave(*scheduler.running->stack);
    }
}

NOT_INSTRUMENTED void Scheduler::resume(Fiber* fiber) {
    switch_block(fiber->block);
    running = fiber;
    current = fiber;
    START_SWITCH(&scheduler_fake_stack_, fiber->stack->begin, stack_bytes);
    emulator_switch_stack(&scheduler_pointer_, fiber->stack->pointer);
    FINISH_SWITCH(scheduler_fake_stack_, nullptr, nullptr);
    running = nullptr;
    current = nullptr;
}

// Back to the scheduler; returns when the stack is resumed.
NOT_INSTRUMENTED void Scheduler::leave(Stack& stack) {
    START_SWITCH(&stack.fake, scheduler_stack_, scheduler_stack_bytes_);
    emulator_switch_stack(&stack.pointer, scheduler_pointer_);
    FINISH_SWITCH(stack.fake, &scheduler_stack_, &scheduler_stack_bytes_);
}

void Scheduler::suspend(Wait wait, const char* file, int line) {
    Fiber* fiber = running;
    fiber->waiting = wait;
    fiber->file = file;
    fiber->line = line;
    leave(*fiber->stack);
}

void Scheduler::wake(Fiber* fiber) {
    fiber->waiting = Wait::none;
    runnable_.push_back(fiber);
}

void Scheduler::switch_block(Block* block) {
    if (loaded_ == block) return;
    const size_t bytes = request->static_shared_bytes;
    if (bytes) {
        if (loaded_ != nullptr) move_bytes(loaded_->statics->begin, request->static_shared, bytes);
        move_bytes(request->static_shared, block->statics->begin, bytes);
    }
    loaded_ = block;
}

// Every thread of `fibers` has seen what the others did before this point.
void Scheduler::join(std::vector<Fiber*> const& fibers) {
    bool released = false;
    for (Fiber* fiber : fibers) released |= fiber->released;
    for (Fiber* fiber : fibers) fiber->released |= released;
    if (!tracking) return;
    JoinedClocks joined;
    joined.reset(fibers_.size());
    for (const Fiber* fiber : fibers) joined.add(fiber->clock);
    const Seen seen = joined.seen();
    for (Fiber* fiber : fibers) {
        fiber->clock.seen = seen;
        ++fiber->clock.own;
    }
}

void Scheduler::absorb(Fiber& fiber, const Seen& seen, bool released) {
    fiber.released |= released;
    if (!tracking) return;
    JoinedClocks joined;
    joined.reset(fibers_.size());
    joined.add(fiber.clock.seen);
    joined.add(seen);
    fiber.clock.seen = joined.seen();
}

void Scheduler::finish(Fiber& fiber) {
    if (fiber.copy_groups.size() || fiber.open_copies.size())
        fail("copy", "the thread ends with asynchronous copies under way");
    fiber.ended = true;
    Block& block = *fiber.block;
    ++block.ended;
    --live_;
    if (block.arrived)
        fail("barrier", "this thread ends while %u threads of its block wait at __syncthreads (%s:%d)", block.arrived,
             block.file, block.line);
    for (const Meeting& meeting : block.meetings[fiber.warp])
        if (meeting.mask >> fiber.lane & 1)
            fail("mask", "this thread ends, but its lane %u is in mask %08x that others wait for (%s:%d)", fiber.lane,
                 meeting.mask, meeting.file, meeting.line);
    if (block.ended == block.fibers.size()) {
        if (request->pdl && !block.waited_pdl)
            fail("pdl", "the block ends without griddepcontrol.wait in a launch that may overtake its predecessor");
        block.dynamic->finished = block.statics->finished = true;
    }
    complete_cluster_phase();
}

void Scheduler::report_deadlock() {
    std::map<std::string, std::pair<int, unsigned>> groups;  // where -> how many, the first thread
    for (const Fiber& fiber : fibers_) {
        std::string where = "block " + std::to_string(fiber.block->rank) + " of the cluster: ";
        where += fiber.ended ? "ended"
                             : std::string("wait at ") + wait_name(fiber.waiting) + " (" + fiber.file + ":" +
                std::to_string(fiber.line) + ")";
        auto [entry, fresh] = groups.emplace(where, std::make_pair(0, fiber.number));
        ++entry->second.first;
    }
    std::string text;
    for (const auto& [where, group] : groups)
        text +=
            "\n  " + std::to_string(group.first) + " threads (first " + std::to_string(group.second) + ") of " + where;
    fail("deadlock", "no thread can go on:%s", text.c_str());
}

// ---- launches ----

LaunchCounts Scheduler::run(const LaunchRequest& launch) {
    request = &launch;
    counts = LaunchCounts{};
    const Extent clusters{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                          launch.grid.z / launch.cluster.z};
    const unsigned cluster_blocks = launch.cluster.x * launch.cluster.y * launch.cluster.z;
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z;

    fibers_ = std::vector<Fiber>(size_t{cluster_blocks} * threads);
    while (stacks_.size() < fibers_.size()) {
        void* stack = mmap(nullptr, stack_bytes + 4096, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED) fail("harness", "cannot map a stack");
        mprotect(stack, 4096, PROT_NONE);
        Stack& added = stacks_.emplace_back();
        added.begin = static_cast<char*>(stack) + 4096;
        added.pointer = first_frame(added.begin, stack_bytes, &Scheduler::trampoline);
    }
    blocks_ = std::vector<Block>(cluster_blocks);
    for (unsigned rank = 0; rank < cluster_blocks; ++rank) {
        Block& block = blocks_[rank];
        block.rank = static_cast<int>(rank);
        block.dynamic = memory.add("dynamic shared", Space::dynamic_shared, launch.shared_memory);
        block.statics = memory.add("static shared", Space::static_shared, launch.static_shared_bytes);
        block.dynamic->block = block.statics->block = block.rank;
    }

    counts.first_run = memory.next_run();
    memory.begin_launch(launch.on_the_way, launch.after_unknown);
    std::vector<unsigned> order(size_t{clusters.x} * clusters.y * clusters.z);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    for (unsigned i : order)
        run_cluster(Extent{i % clusters.x * launch.cluster.x, i / clusters.x % clusters.y * launch.cluster.y,
                           i / clusters.x / clusters.y * launch.cluster.z});
    for (const Block& block : blocks_)
        counts.shared_touched = std::max(counts.shared_touched, block.dynamic->touched_end);
    for (Block& block : blocks_) {
        memory.remove(block.dynamic);
        memory.remove(block.statics);
    }
    request = nullptr;
    return counts;
}

void Scheduler::run_cluster(Extent first) {
    const LaunchRequest& launch = *request;
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    memory.begin_run();
    runnable_.clear();
    mbarriers_.clear();
    loaded_ = nullptr;
    cluster_arrived_ = cluster_phase_ = 0;
    cluster_arriving_.reset(fibers_.size());
    cluster_arriving_released_ = false;
    live_ = static_cast<unsigned>(fibers_.size());
    const Seen nothing = std::make_shared<const std::vector<uint32_t>>(tracking ? fibers_.size() : 0, 0);

    for (Block& block : blocks_) {
        const unsigned rank = static_cast<unsigned>(block.rank);
        block.fibers.clear();
        block.meetings.assign((threads + 31) / 32, {});
        block.arrived = block.ended = 0;
        block.any = block.count = 0;
        block.all = 1;
        block.waited_pdl = false;
        for (Region* region : {block.dynamic, block.statics}) {
            memory.forget(*region, pattern_);
            region->finished = false;
        }
        for (unsigned t = 0; t < threads; ++t) {
            const unsigned number = rank * threads + t;
            Fiber& fiber = fibers_[number];
            fiber = Fiber{};
            fiber.thread_index = {t % launch.block.x, t / launch.block.x % launch.block.y,
                                  t / launch.block.x / launch.block.y};
            fiber.block_index = {first.x + rank % launch.cluster.x,
                                 first.y + rank / launch.cluster.x % launch.cluster.y,
                                 first.z + rank / launch.cluster.x / launch.cluster.y};
            fiber.block_dim = launch.block;
            fiber.grid_dim = launch.grid;
            fiber.cluster_rank = rank;
            fiber.cluster_size = static_cast<unsigned>(blocks_.size());
            fiber.lane = t % 32;
            fiber.warp = t / 32;
            fiber.number = number;
            fiber.block = &block;
            fiber.released = !launch.pdl;
            fiber.clock = Clock{nothing, 1, number};
            fiber.stack = &stacks_[number];
            block.fibers.push_back(&fiber);
            runnable_.push_back(&fiber);
        }
        ++counts.blocks;
    }

    while (!runnable_.empty()) {
        std::swap(runnable_[random_() % runnable_.size()], runnable_.back());
        Fiber* next = runnable_.back();
        runnable_.pop_back();
        resume(next);
    }
    for (const Fiber& fiber : fibers_)
        if (!fiber.ended) report_deadlock();
    loaded_ = nullptr;
}

// ---- barriers of a block ----

BlockVote Scheduler::block_barrier(int predicate, const char* file, int line) {
    Block& block = *running->block;
    if (block.ended)
        fail("barrier", "__syncthreads (%s:%d) after %u threads of the block have ended", file, line, block.ended);
    if (block.arrived == 0) {
        block.file = file;
        block.line = line;
        block.any = block.count = 0;
        block.all = 1;
    } else if (block.line != line || std::strcmp(block.file, file) != 0) {
        fail("barrier", "divergent: this thread is at %s:%d, %u threads of its block wait at %s:%d", file, line,
             block.arrived, block.file, block.line);
    }
    block.any |= predicate != 0;
    block.all &= predicate != 0;
    block.count += predicate != 0;
    if (++block.arrived < block.fibers.size()) {
        suspend(Wait::block_barrier, file, line);
        return running->vote;
    }
    ++counts.barriers;
    block.arrived = 0;
    join(block.fibers);
    for (Fiber* fiber : block.fibers) {
        fiber->vote = BlockVote{block.any, block.all, block.count};
        wake(fiber);
    }
    suspend(Wait::none, file, line);
    return running->vote;
}

// ---- warps ----

const uint64_t* Scheduler::warp_meet(unsigned mask, WarpOp op, uint64_t value, const char* file, int line) {
    Fiber& fiber = *running;
    Block& block = *fiber.block;
    std::vector<Meeting>& meetings = block.meetings[fiber.warp];
    if (!(mask >> fiber.lane & 1))
        fail("mask", "lane %u executes a warp operation whose mask %08x leaves it out (%s:%d)", fiber.lane, mask, file,
             line);
    const unsigned first = fiber.warp * 32;
    auto meeting = std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& m) { return m.mask == mask; });
    if (meeting == meetings.end()) {
        // A lane that ends later finds its name in the mask (finish).
        for (unsigned lane = 0; lane < 32; ++lane)
            if ((mask >> lane & 1) && (first + lane >= block.fibers.size() || block.fibers[first + lane]->ended))
                fail("mask", "mask %08x names lane %u, which has ended or does not exist (%s:%d)", mask, lane, file,
                     line);
        meetings.push_back(Meeting{mask, 0, op, file, line, std::make_shared<LaneValues>()});
        meeting = meetings.end() - 1;
    } else if (meeting->op != op || meeting->line != line || std::strcmp(meeting->file, file) != 0) {
        fail("mask", "lane %u is at %s:%d while lanes %08x of the same mask %08x wait at %s:%d", fiber.lane, file, line,
             meeting->arrived, mask, meeting->file, meeting->line);
    }
    meeting->arrived |= 1u << fiber.lane;
    meeting->values->of[fiber.lane] = value;
    if (meeting->arrived == mask) {
        ++counts.warp_operations;
        std::vector<Fiber*> lanes;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) lanes.push_back(block.fibers[first + lane]);
        // Only __syncwarp orders memory.
        if (op == WarpOp::sync) join(lanes);
        for (Fiber* lane : lanes) {
            lane->lanes = meeting->values;
            wake(lane);
        }
        meetings.erase(meeting);
        suspend(Wait::none, file, line);
    } else {
        suspend(Wait::warp, file, line);
    }
    return running->lanes->of;
}

// ---- launch attributes ----

void Scheduler::pdl_wait() {
    if (!request->waits) return;
    ++counts.pdl_waits;
    running->released = true;
    running->block->waited_pdl = true;
}

void Scheduler::pdl_trigger() {
    if (!request->triggers) return;
    ++counts.pdl_triggers;
    counts.triggers_early |= !running->released;
}

void* Scheduler::dynamic_shared() {
    return running->block->dynamic->begin;
}

}  // namespace emulator
