// Allocations that fail when a test wants them to. A file of its own, so that no compiler looks into `new`.
#include <cstdlib>
#include <new>

// Allocations left until one fails; negative: none does. Only in this thread.
thread_local long allocations_left = -1;

void* operator new(std::size_t size) {
    if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
    void* memory = std::malloc(size == 0 ? 1 : size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void* operator new(std::size_t size, std::align_val_t alignment) {
    if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
    const std::size_t unit = static_cast<std::size_t>(alignment);
    void* memory = std::aligned_alloc(unit, (size + unit - 1) / unit * unit + (size == 0 ? unit : 0));
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
