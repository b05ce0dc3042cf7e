// Executes a request file: buffers, then launches in order; writes the buffers and the counts to a response file.
//
// Request, little endian: u64 seed, u32 pattern; u32 buffers, each {string name, u64 bytes, u32 flags (1 holds data,
// 2 an output that must be written entirely), data}; u32 launches, each {string library, string entry, u32 grid[3],
// block[3], cluster[3], u64 shared memory, u32 pdl, waits, triggers, u32 written, u32 indices[..], u32 read, u32 indices[..], u32 arguments,
// each {u32 kind (0 bytes, 1 pointer), bytes: u32 size and data; pointer: u32 buffer + 1 or 0 for null, u64 offset}}.
// A string is u32 length and its bytes. Response: the bytes of each buffer; standard output: counts as JSON.
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "scheduler.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace emulator {

namespace {

constexpr int exit_fault = 77;

[[noreturn]] void report(const void* pc, const char* kind, const char* format, va_list list) {
    std::fprintf(stderr, "EMULATOR %s: ", kind);
    std::vfprintf(stderr, format, list);
    std::fprintf(stderr, "\n");
    if (const Fiber* f = running())
        std::fprintf(stderr, "  in kernel %s, block (%u, %u, %u), thread (%u, %u, %u)\n",
                     scheduler.request->entry.c_str(), f->block_index.x, f->block_index.y, f->block_index.z,
                     f->thread_index.x, f->thread_index.y, f->thread_index.z);
    Dl_info where;
    if (pc != nullptr && dladdr(pc, &where) && where.dli_fname != nullptr)
        std::fprintf(stderr, "  at %s 0x%zx\n", where.dli_fname,
                     static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(where.dli_fbase)) - 1);
    std::fflush(stderr);
    _exit(exit_fault);
}

}  // namespace

void fail(const char* kind, const char* format, ...) {
    va_list list;
    va_start(list, format);
    report(nullptr, kind, format, list);
}

void fail_at(const void* pc, const char* kind, const char* format, ...) {
    va_list list;
    va_start(list, format);
    report(pc, kind, format, list);
}

namespace {

class Reader {
  public:
    explicit Reader(const char* path) : stream_(path, std::ios::binary) {
        if (!stream_) fail("harness", "cannot read %s", path);
    }
    void bytes(void* to, size_t count) {
        if (!stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(count)))
            fail("harness", "the request ends early");
    }
    template <class T>
    T number() {
        T value;
        bytes(&value, sizeof(T));
        return value;
    }
    std::string text() {
        std::string value(number<uint32_t>(), '\0');
        bytes(value.data(), value.size());
        return value;
    }
    Extent extent() {
        Extent e;
        e.x = number<uint32_t>();
        e.y = number<uint32_t>();
        e.z = number<uint32_t>();
        return e;
    }

  private:
    std::ifstream stream_;
};

struct TlsIndex {
    unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

// The thread-local block of a library: all its static shared memory.
void find_static_shared(void* library, LaunchRequest& launch) {
    struct link_map* map = nullptr;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map)) fail("harness", "dlinfo: %s", dlerror());
    struct Found {
        ElfW(Addr) base;
        LaunchRequest* launch;
    } found{map->l_addr, &launch};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto* f = static_cast<Found*>(data);
            if (info->dlpi_addr != f->base) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i)
                if (info->dlpi_phdr[i].p_type == PT_TLS) {
                    TlsIndex index{info->dlpi_tls_modid, 0};
                    f->launch->static_shared = static_cast<char*>(__tls_get_addr(&index));
                    f->launch->static_shared_bytes = info->dlpi_phdr[i].p_memsz;
                }
            return 1;
        },
        &found);
}

void bind_entry(const std::string& path, LaunchRequest& launch, const std::vector<unsigned>& sizes) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) fail("harness", "dlopen: %s", dlerror());
    const auto* entries = static_cast<const Entry*>(dlsym(library, "emulator_entries"));
    if (entries == nullptr) fail("harness", "%s has no entry table", path.c_str());
    while (entries->name != nullptr && launch.entry != entries->name) ++entries;
    if (entries->name == nullptr) fail("harness", "%s has no kernel %s", path.c_str(), launch.entry.c_str());
    if (static_cast<size_t>(entries->argument_count) != sizes.size())
        fail("arguments", "kernel %s takes %d arguments, the launch passes %zu", launch.entry.c_str(),
             entries->argument_count, sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i)
        if (entries->argument_sizes[i] != sizes[i])
            fail("arguments", "argument %zu of kernel %s has %u bytes, the launch passes %u", i, launch.entry.c_str(),
                 entries->argument_sizes[i], sizes[i]);
    launch.invoke = entries->invoke;
    find_static_shared(library, launch);
}

// Subnormal float32 results are 0 and subnormal operands count as 0, as under -ftz=true.
void flush_subnormals() {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    asm volatile("msr fpcr, %0" ::"r"(control | 1u << 24));
#else
#error "flush_subnormals: unknown architecture"
#endif
}

struct Earlier {
    uint32_t first_run;
    bool pdl, triggers_early;
};

int execute(const char* request_path, const char* response_path) {
    Reader reader(request_path);
    const auto seed = reader.number<uint64_t>();
    const auto pattern = static_cast<int>(reader.number<uint32_t>());
    scheduler.seed(seed, pattern);

    std::vector<Region*> buffers;
    std::vector<bool> outputs;
    const auto buffer_count = reader.number<uint32_t>();
    for (uint32_t i = 0; i < buffer_count; ++i) {
        const std::string name = reader.text();
        const auto bytes = reader.number<uint64_t>();
        const auto flags = reader.number<uint32_t>();
        Region* region = memory.add(name, Space::global, bytes);
        memory.forget(*region, pattern);
        if (flags & 1) {
            reader.bytes(region->begin, bytes);
            memory.mark_initialized(*region);
        }
        buffers.push_back(region);
        outputs.push_back(flags & 2);
    }

    std::printf("{\"launches\": [");
    const auto launch_count = reader.number<uint32_t>();
    std::vector<Earlier> earlier;
    for (uint32_t i = 0; i < launch_count; ++i) {
        LaunchRequest launch;
        const std::string library = reader.text();
        launch.entry = reader.text();
        launch.grid = reader.extent();
        launch.block = reader.extent();
        launch.cluster = reader.extent();
        launch.shared_memory = reader.number<uint64_t>();
        launch.pdl = reader.number<uint32_t>();
        launch.waits = reader.number<uint32_t>();
        launch.triggers = reader.number<uint32_t>();
        // Until it waits, the launch before a programmatic dependent may be under way; of that launch the one before it,
        // where it lets its dependent start before it has waited itself; and so on. What came before the first launch is
        // unknown.
        launch.on_the_way = memory.next_run();
        bool dependent = launch.pdl;
        for (auto one = earlier.rbegin(); dependent; ++one) {
            launch.after_unknown = one == earlier.rend();
            if (launch.after_unknown) break;
            launch.on_the_way = one->first_run;
            dependent = one->pdl && one->triggers_early;
        }
        for (Region* region : buffers) region->writable = region->readable = false;
        const auto written = reader.number<uint32_t>();
        for (uint32_t w = 0; w < written; ++w) buffers.at(reader.number<uint32_t>())->writable = true;
        const auto read = reader.number<uint32_t>();
        for (uint32_t r = 0; r < read; ++r) buffers.at(reader.number<uint32_t>())->readable = true;
        const auto argument_count = reader.number<uint32_t>();
        std::vector<unsigned> sizes;
        for (uint32_t a = 0; a < argument_count; ++a) {
            if (reader.number<uint32_t>() == 0) {
                const auto size = reader.number<uint32_t>();
                void* value = std::aligned_alloc(16, (size + 15) / 16 * 16);
                reader.bytes(value, size);
                launch.arguments.push_back(value);
                sizes.push_back(size);
            } else {
                const auto buffer = reader.number<uint32_t>();
                const auto offset = reader.number<uint64_t>();
                launch.arguments.push_back(new char*(buffer ? buffers.at(buffer - 1)->begin + offset : nullptr));
                sizes.push_back(sizeof(char*));
            }
        }
        bind_entry(library, launch, sizes);
        flush_subnormals();
        const LaunchCounts counts = scheduler.run(launch);
        earlier.push_back(Earlier{counts.first_run, launch.pdl, counts.triggers_early});
        std::printf(
            "%s{\"entry\": \"%s\", \"blocks\": %zu, \"barriers\": %zu, \"warp_operations\": %zu, \"pdl_waits\": %zu, "
            "\"pdl_triggers\": %zu, \"cluster_barriers\": %zu, \"shared_touched\": %zu}",
            i ? ", " : "", launch.entry.c_str(), size_t{counts.blocks}, size_t{counts.barriers},
            size_t{counts.warp_operations}, size_t{counts.pdl_waits}, size_t{counts.pdl_triggers},
            size_t{counts.cluster_barriers}, counts.shared_touched);
    }
    std::printf("]}\n");

    std::ofstream response(response_path, std::ios::binary);
    for (size_t i = 0; i < buffers.size(); ++i) {
        size_t first = 0;
        if (const size_t count = outputs[i] ? memory.unwritten(*buffers[i], &first) : 0)
            fail("unwritten", "%zu of %zu bytes of output '%s' have not been written, the first at %zu", count,
                 buffers[i]->bytes, buffers[i]->name.c_str(), first);
        response.write(buffers[i]->begin, static_cast<std::streamsize>(buffers[i]->bytes));
    }
    return response.good() ? 0 : 1;
}

}  // namespace

}  // namespace emulator

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    return emulator::execute(argv[1], argv[2]);
}
