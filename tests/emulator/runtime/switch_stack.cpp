// Switches between stacks. swapcontext would do, but makes two system calls for each switch.
#include "scheduler.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
asm(R"(
    .text
    .globl emulator_switch_stack
    .type emulator_switch_stack, @function
emulator_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch_stack, .-emulator_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl emulator_switch_stack
    .type emulator_switch_stack, %function
emulator_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulator_switch_stack, .-emulator_switch_stack
)");
#else
#error "the emulator runs on x86_64 and aarch64"
#endif

namespace emulator {

// What a first switch to the stack finds: registers of no meaning, and `entry` as the place to return to.
void* first_frame(char* stack, size_t bytes, void (*entry)()) {
    const uint64_t address = reinterpret_cast<uint64_t>(entry);
#if defined(__x86_64__)
    char* const frame = stack + bytes - 64;  // six registers, the address, and what aligns it as a call does
    std::memset(frame, 0, 64);
    std::memcpy(frame + 48, &address, 8);
#else
    char* const frame = stack + bytes - 160;
    std::memset(frame, 0, 160);
    std::memcpy(frame + 88, &address, 8);  // x30
#endif
    return frame;
}

}  // namespace emulator
