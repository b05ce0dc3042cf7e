// The hooks that a compiler puts before each access under -fsanitize=thread, bound to the emulator's own memory
// model in place of ThreadSanitizer's run-time library.
#include "memory.h"

using emulator::Access;

#define CHECK(kind, address, bytes) emulator::memory.access(address, bytes, Access::kind, __builtin_return_address(0))

#define HOOKS(bytes)                                    \
    void __tsan_read##bytes(void* address) {            \
        CHECK(read, address, bytes);                    \
    }                                                   \
    void __tsan_write##bytes(void* address) {           \
        CHECK(write, address, bytes);                   \
    }                                                   \
    void __tsan_unaligned_read##bytes(void* address) {  \
        CHECK(read, address, bytes);                    \
    }                                                   \
    void __tsan_unaligned_write##bytes(void* address) { \
        CHECK(write, address, bytes);                   \
    }                                                   \
    void __tsan_volatile_read##bytes(void* address) {   \
        CHECK(read, address, bytes);                    \
    }                                                   \
    void __tsan_volatile_write##bytes(void* address) {  \
        CHECK(write, address, bytes);                   \
    }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) {
    CHECK(read, address, bytes);
}
void __tsan_write_range(void* address, size_t bytes) {
    CHECK(write, address, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
