// Memory for a call: aligned, not initialized, and given back to be used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

// Under the address sanitizer, what lies between two arrays of a block may not be touched.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MREM_GUARDED_SCRATCH
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define MREM_GUARDED_SCRATCH
#endif
#ifdef MREM_GUARDED_SCRATCH
#include <sanitizer/asan_interface.h>

#include <utility>
#include <vector>
#endif

namespace mrem::runtime {

constexpr std::size_t kAlignment = 64;

struct AlignedDelete {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kAlignment}); }
};

// An aligned array of n numbers.
template <class T>
class Buffer {
  public:
    static_assert(std::is_trivial<T>::value, "memory that is not initialized");
    Buffer() = default;
    explicit Buffer(std::size_t n) : memory_(::operator new(n * sizeof(T), std::align_val_t{kAlignment})) {}
    T* data() const { return static_cast<T*>(memory_.get()); }

  private:
    std::unique_ptr<void, AlignedDelete> memory_;
};

// One block of memory that grows when a call needs more than any call before.
//
// Note: a block belongs to a call, not to an operator or a thread. A call leases one from a list that all
// operators share, so there are as many blocks as calls (and their tasks) ever ran at the same time.
class Scratch {
  public:
    std::uint8_t* reserve(std::size_t bytes) {
        if (bytes > size_) {
            size_ = 0;
            memory_ = Buffer<std::uint8_t>();  // first give back, then take
            memory_ = Buffer<std::uint8_t>(bytes);
            size_ = bytes;
        }
#ifdef MREM_GUARDED_SCRATCH
        ASAN_UNPOISON_MEMORY_REGION(memory_.data(), size_);
#endif
        return memory_.data();
    }
    std::size_t size() const { return size_; }

  private:
    Buffer<std::uint8_t> memory_;
    std::size_t size_ = 0;
};

// A lease for as long as this object lives.
class Lease {
  public:
    Lease();
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Scratch& operator*() const { return *scratch_; }

  private:
    std::unique_ptr<Scratch> scratch_;
};

// Several arrays side by side in one block: first ask for all of them, then place them.
//     Arrays arrays; auto a = arrays.add<float>(n); …; arrays.place(scratch); float* x = arrays.at(a);
class Arrays {
  public:
    template <class T>
    struct Slot {
        std::size_t offset;
    };
    template <class T>
    Slot<T> add(std::size_t n) {
        const Slot<T> slot{bytes_};
        bytes_ += (n * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
#ifdef MREM_GUARDED_SCRATCH
        bytes_ += kAlignment;
        guards_.emplace_back(slot.offset + n * sizeof(T), bytes_);
#endif
        return slot;
    }
    void place(Scratch& scratch) {
        memory_ = scratch.reserve(bytes_);
#ifdef MREM_GUARDED_SCRATCH
        for (const auto& [first, last] : guards_) ASAN_POISON_MEMORY_REGION(memory_ + first, last - first);
#endif
    }
    template <class T>
    T* at(Slot<T> slot) const {
        return reinterpret_cast<T*>(memory_ + slot.offset);
    }

  private:
    std::size_t bytes_ = 0;
    std::uint8_t* memory_ = nullptr;
#ifdef MREM_GUARDED_SCRATCH
    std::vector<std::pair<std::size_t, std::size_t>> guards_;  // from the end of an array to the next
#endif
};

}  // namespace mrem::runtime
