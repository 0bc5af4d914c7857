// Lays arrays out in memory that the caller owns.
#pragma once

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <cstddef>
#include <cstdint>

namespace tokenmill {

// Under AddressSanitizer what lies between two arrays may not be touched; else nothing.
static inline void guard([[maybe_unused]] char* begin, [[maybe_unused]] size_t size, [[maybe_unused]] size_t until_next) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(begin, size);
    __asan_poison_memory_region(begin + size, until_next - size);
#endif
}

// Memory that guards are set in for as long as this lives. They would outlast the memory: what is mapped there next is others'.
struct Guarded {
    void* memory;
    size_t size;
    ~Guarded() {
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(memory, size);
#endif
    }
};

// Without memory it only counts the bytes that it would use.
struct Arena {
    static constexpr size_t kGap = 64;
    char* base;
    size_t used = 0;

    template <typename T>
    T* take(int64_t count) {
        T* const p = base ? (T*)(base + used) : nullptr;
        const size_t size = size_t(count) * sizeof(T), rounded = (size + 63) / 64 * 64;
        if (base) guard(base + used, size, rounded + kGap);
        used += rounded + kGap;
        return p;
    }
};

}  // namespace tokenmill
