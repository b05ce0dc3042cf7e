// The memory that kernels may touch, and what is known of each of its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

enum class Access { read, write, atomic };
enum class Space { global, dynamic_shared, static_shared };

// A moment of one thread: its number in the cluster and its own clock.
struct Epoch {
    uint32_t clock = 0;
    uint32_t thread = 0;
};

// The history of one byte, as far as races and unwritten bytes need it. A run is one cluster of one launch.
struct Cell {
    uint32_t write_run = 0, read_run = 0;
    // The latest runs of earlier launches that wrote and read it, once this launch has touched it too.
    uint32_t write_before = 0, read_before = 0;
    Epoch write, read;
    uint32_t more_reads = 0;  // index + 1 of the first of a list of further readers
    bool initialized = false;
    bool atomic_write = false;
    bool read_by_other_run = false;
    bool unused = false;  // no padding, so that cells compare as bytes
};

// A list of readers of a run. Bytes share lists and tails of lists, so nothing of a list changes.
struct Reader {
    Epoch epoch;
    uint32_t next;  // index + 1
};

struct Region {
    std::string name;
    Space space;
    char* begin;
    size_t bytes;
    int block = -1;                         // of the cluster, for shared memory
    bool writable = true, readable = true;  // by this launch
    bool finished = false;                  // shared memory of a block that has ended
    size_t touched_end = 0;
    std::vector<Cell> cells;
};

class Memory {
  public:
    // Exactly `bytes` bytes, aligned to 256; anything beside them is out of bounds.
    Region* add(std::string name, Space space, size_t bytes);
    void remove(Region* region);
    // Makes every byte unwritten again and fills it with `pattern`.
    void forget(Region& region, int pattern);
    void mark_initialized(Region& region);
    // Marks bytes as holding nothing until the copy on its way there lands.
    void mark_unwritten(const void* address, size_t bytes, int pattern);
    size_t unwritten(const Region& region, size_t* first) const;

    Region* find(const void* address);
    bool in_arena(const void* address) const;
    // Checks one access of the running thread; `pc` names the code in reports.
    void access(const void* address, size_t bytes, Access kind, const void* pc);
    void check_readonly(const void* address, size_t bytes);

    // The runs from `on_the_way` on belong to launches that may still be under way until a thread has waited; with
    // `after_unknown`, so may launches that are not known.
    void begin_launch(uint32_t on_the_way, bool after_unknown);
    void begin_run();
    uint32_t next_run() const {
        return run_ + 1;
    }

  private:
    void remember_earlier_launches(Cell& cell) const;
    void check_before_wait(const Region& region, const Cell& cell, size_t offset, Access kind, const void* pc);
    void read_byte(Region& region, Cell& cell, size_t offset, const void* pc);
    void write_byte(Region& region, Cell& cell, size_t offset, bool atomic, const void* pc);
    bool ordered(const Epoch& epoch) const;
    [[noreturn]] void race(const Region& region, size_t offset, const char* now, const char* before, const Epoch& epoch,
                           const void* pc);
    [[noreturn]] void race_across(const Region& region, size_t offset, const char* now, const char* before,
                                  const void* pc);

    std::vector<Region*> regions_;  // ascending addresses
    Region* last_ = nullptr;
    char* arena_ = nullptr;
    size_t arena_used_ = 0;
    uint32_t run_ = 0, first_run_of_launch_ = 1, on_the_way_ = 0;
    bool after_unknown_ = false;
    std::vector<Reader> readers_;
};

extern Memory memory;

// Whether accesses are tracked byte by byte: true in the "access" build, false beside AddressSanitizer.
#ifdef EMULATOR_TRACK
constexpr bool tracking = true;
#else
constexpr bool tracking = false;
#endif

}  // namespace emulator
