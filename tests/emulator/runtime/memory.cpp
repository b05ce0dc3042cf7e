#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

namespace emulator {

Memory memory;

namespace {
constexpr size_t arena_bytes = size_t{1} << 34;  // reserved, not committed
constexpr size_t gap = 4096;
constexpr size_t alignment = 256;

const char* space_name(Space space) {
    return space == Space::global ? "global" : "shared";
}
}  // namespace

Region* Memory::add(std::string name, Space space, size_t bytes) {
    auto* region = new Region{std::move(name), space, nullptr, bytes, -1, true, true, false, 0, {}};
    if constexpr (tracking) {
        if (arena_ == nullptr) {
            void* mapped =
                mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (mapped == MAP_FAILED) fail("harness", "cannot reserve the arena");
            arena_ = static_cast<char*>(mapped);
        }
        region->begin = arena_ + (arena_used_ + gap);
        arena_used_ = (arena_used_ + gap + bytes + alignment - 1) / alignment * alignment;
        if (arena_used_ + gap > arena_bytes) fail("harness", "the arena is full");
        region->cells.resize(bytes);
    } else {
        void* allocated = nullptr;
        if (posix_memalign(&allocated, alignment, bytes)) fail("harness", "out of memory");
        region->begin = static_cast<char*>(allocated);
    }
    const auto place = std::upper_bound(regions_.begin(), regions_.end(), region,
                                        [](const Region* a, const Region* b) { return a->begin < b->begin; });
    regions_.insert(place, region);
    return region;
}

void Memory::remove(Region* region) {
    regions_.erase(std::find(regions_.begin(), regions_.end(), region));
    last_ = nullptr;
    if constexpr (!tracking) std::free(region->begin);
    delete region;
}

void Memory::forget(Region& region, int pattern) {
    if (region.bytes) std::memset(region.begin, pattern, region.bytes);
    std::fill(region.cells.begin(), region.cells.end(), Cell{});
}

void Memory::mark_initialized(Region& region) {
    for (Cell& cell : region.cells) cell.initialized = true;
}

void Memory::mark_unwritten(const void* address, size_t bytes, int pattern) {
    std::memset(const_cast<void*>(address), pattern, bytes);
    const char* canonical = static_cast<const char*>(canonical_address(address));
    if (Region* region = find(canonical); region != nullptr && tracking)
        for (size_t i = 0; i < bytes; ++i) region->cells[canonical - region->begin + i].initialized = false;
}

size_t Memory::unwritten(const Region& region, size_t* first) const {
    size_t count = 0;
    for (size_t i = region.cells.size(); i-- > 0;)
        if (!region.cells[i].initialized) {
            ++count;
            *first = i;
        }
    return count;
}

bool Memory::in_arena(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - arena_) < arena_bytes;
}

Region* Memory::find(const void* address) {
    const char* a = static_cast<const char*>(address);
    if (last_ != nullptr && a >= last_->begin && a < last_->begin + last_->bytes) return last_;
    auto next = std::upper_bound(regions_.begin(), regions_.end(), a,
                                 [](const char* value, const Region* region) { return value < region->begin; });
    if (next == regions_.begin()) return nullptr;
    Region* region = *--next;
    if (a >= region->begin + region->bytes) return nullptr;
    last_ = region;
    return region;
}

void Memory::begin_launch(uint32_t on_the_way, bool after_unknown) {
    first_run_of_launch_ = run_ + 1;
    on_the_way_ = on_the_way;
    after_unknown_ = after_unknown;
}

void Memory::begin_run() {
    ++run_;
    readers_.clear();
}

bool Memory::ordered(const Epoch& epoch) const {
    const Fiber& fiber = *running();
    return epoch.thread == fiber.number || epoch.clock <= fiber.clock.at(epoch.thread);
}

void Memory::race(const Region& region, size_t offset, const char* now, const char* before, const Epoch& epoch,
                  const void* pc) {
    fail_at(pc, "race", "this thread %s byte %zu of %s memory '%s', which thread %u %s with no barrier between", now,
            offset, space_name(region.space), region.name.c_str(), unsigned{epoch.thread}, before);
}

void Memory::race_across(const Region& region, size_t offset, const char* now, const char* before, const void* pc) {
    fail_at(pc, "race", "this thread %s byte %zu of global memory '%s', which another cluster of this launch %s", now,
            offset, region.name.c_str(), before);
}

void Memory::check_before_wait(const Region& region, const Cell& cell, size_t offset, Access kind, const void* pc) {
    const auto on_the_way = [this](uint32_t run) { return run >= on_the_way_ && run < first_run_of_launch_; };
    const bool untouched = cell.read_run < first_run_of_launch_ && cell.write_run < first_run_of_launch_;
    const bool written = on_the_way(untouched ? cell.write_run : cell.write_before);
    const bool read = on_the_way(untouched ? cell.read_run : cell.read_before);
    if (after_unknown_ || written || (kind != Access::read && read))
        fail_at(pc, "pdl",
                "%s byte %zu of global memory '%s' before griddepcontrol.wait, beside a launch that may still be under "
                "way and %s it",
                kind == Access::read ? "reads" : "writes", offset, region.name.c_str(),
                after_unknown_ ? "may touch" : written ? "writes" : "reads");
}

void Memory::remember_earlier_launches(Cell& cell) const {
    if (cell.read_run >= first_run_of_launch_ || cell.write_run >= first_run_of_launch_) return;
    cell.write_before = cell.write_run;
    cell.read_before = cell.read_run;
}

void Memory::read_byte(Region& region, Cell& cell, size_t offset, const void* pc) {
    const Fiber& fiber = *running();
    if (!cell.initialized)
        fail_at(pc, "unwritten", "reads byte %zu of %s memory '%s', which nothing has written", offset,
                space_name(region.space), region.name.c_str());
    if (!region.readable && cell.write_run < first_run_of_launch_)
        fail_at(pc, "undeclared", "reads byte %zu of '%s', which the launch does not declare as read", offset,
                region.name.c_str());
    if (cell.write_run == run_) {
        if (!ordered(cell.write)) race(region, offset, "reads", "wrote", cell.write, pc);
    } else if (cell.write_run >= first_run_of_launch_) {
        race_across(region, offset, "reads", "wrote", pc);
    }
    const Epoch now{fiber.clock.own, fiber.number};
    if (cell.read_run != run_) {
        remember_earlier_launches(cell);
        cell.read_by_other_run = cell.read_run >= first_run_of_launch_;
        cell.read_run = run_;
        cell.read = now;
        cell.more_reads = 0;
    } else if (ordered(cell.read)) {
        cell.read = now;
    } else {
        // A reader may stand in the list again: looking for it in all of a long list takes longer than its memory is
        // worth, 12 bytes for each such read of a run.
        uint32_t at = cell.more_reads;
        for (int looked_at = 0; at && looked_at < 8; ++looked_at, at = readers_[at - 1].next) {
            const Epoch& other = readers_[at - 1].epoch;
            if (other.thread == now.thread && other.clock == now.clock) return;
        }
        readers_.push_back(Reader{now, cell.more_reads});
        cell.more_reads = static_cast<uint32_t>(readers_.size());
    }
}

void Memory::write_byte(Region& region, Cell& cell, size_t offset, bool atomic, const void* pc) {
    const Fiber& fiber = *running();
    const bool both_atomic = atomic && cell.atomic_write;
    if (cell.write_run == run_) {
        if (!both_atomic && !ordered(cell.write)) race(region, offset, "writes", "wrote", cell.write, pc);
    } else if (cell.write_run >= first_run_of_launch_ && !both_atomic) {
        race_across(region, offset, "writes", "wrote", pc);
    }
    if (cell.read_run == run_) {
        if (!ordered(cell.read)) race(region, offset, "writes", "read", cell.read, pc);
        for (uint32_t at = cell.more_reads; at; at = readers_[at - 1].next) {
            const Epoch& other = readers_[at - 1].epoch;
            if (!ordered(other)) race(region, offset, "writes", "read", other, pc);
        }
        if (cell.read_by_other_run) race_across(region, offset, "writes", "read", pc);
    } else if (cell.read_run >= first_run_of_launch_) {
        race_across(region, offset, "writes", "read", pc);
    }
    remember_earlier_launches(cell);
    cell.write_run = run_;
    cell.write = Epoch{fiber.clock.own, fiber.number};
    cell.atomic_write = atomic;
    cell.initialized = true;
    cell.read_run = 0;
    cell.more_reads = 0;
}

void Memory::access(const void* address, size_t bytes, Access kind, const void* pc) {
    if (!tracking || running() == nullptr || bytes == 0) return;
    const char* a = static_cast<const char*>(canonical_address(address));
    if (!in_arena(a)) return;  // the thread's stack and constants
    const char* verb = kind == Access::read ? "reads" : "writes";
    Region* region = find(a);
    if (region == nullptr || a + bytes > region->begin + region->bytes) {
        if (region == nullptr) {
            // Name the buffer that the address has just left.
            auto next = std::upper_bound(regions_.begin(), regions_.end(), a,
                                         [](const char* value, const Region* r) { return value < r->begin; });
            region = next == regions_.begin() ? *next : *--next;
        }
        fail_at(pc, "bounds", "%s %zu bytes at offset %td of %s memory '%s' of %zu bytes", verb, bytes,
                a - region->begin, space_name(region->space), region->name.c_str(), region->bytes);
    }
    const size_t offset = static_cast<size_t>(a - region->begin);
    const Fiber& fiber = *running();
    if (region->space == Space::global) {
        if (kind != Access::read && !region->writable)
            fail_at(pc, "undeclared", "writes byte %zu of '%s', which the launch does not declare as written", offset,
                    region->name.c_str());
    } else {
        if (region->finished)
            fail_at(pc, "cluster", "%s shared memory of block %d of the cluster, which has ended", verb, region->block);
        if (region->block != fiber.block->rank && fiber.cluster_barriers == 0)
            fail_at(pc, "cluster", "%s shared memory of block %d before any cluster barrier: it may not have started",
                    verb, region->block);
    }
    region->touched_end = std::max(region->touched_end, offset + bytes);
    // Bytes of one history have one future: mostly the first byte of a word stands for the others.
    Cell before, after;
    for (size_t i = offset; i < offset + bytes; ++i) {
        Cell& cell = region->cells[i];
        if (i > offset && std::memcmp(&cell, &before, sizeof(Cell)) == 0) {
            cell = after;
            continue;
        }
        if (region->space == Space::global && !fiber.released) check_before_wait(*region, cell, i, kind, pc);
        before = cell;
        if (kind == Access::atomic && !cell.initialized)
            fail_at(pc, "unwritten", "an atomic operation on byte %zu of '%s', which nothing has written", i,
                    region->name.c_str());
        if (kind == Access::read)
            read_byte(*region, cell, i, pc);
        else
            write_byte(*region, cell, i, kind == Access::atomic, pc);
        after = cell;
    }
}

void Memory::check_readonly(const void* address, size_t bytes) {
    if (!tracking || !in_arena(address)) return;
    Region* region = find(address);
    if (region == nullptr) return;  // the read itself reports it
    if (region->space != Space::global)
        fail("readonly", "the read-only path reads shared memory '%s'", region->name.c_str());
    const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - region->begin);
    for (size_t i = offset; i < std::min(offset + bytes, region->bytes); ++i)
        if (region->cells[i].write_run >= first_run_of_launch_)
            fail("readonly", "the read-only path reads byte %zu of '%s', which this launch writes", i,
                 region->name.c_str());
}

}  // namespace emulator
