// The contract is in scratch.h.
#include "scratch.h"

#include <mutex>
#include <vector>

namespace mrem::runtime {
namespace {

struct FreeList {
    std::mutex mutex;
    std::vector<std::unique_ptr<Scratch>> free;
};

FreeList& list() {
    static FreeList all;
    return all;
}

}  // namespace

Lease::Lease() {
    FreeList& all = list();
    {
        const std::lock_guard<std::mutex> lock(all.mutex);
        if (!all.free.empty()) {
            scratch_ = std::move(all.free.back());
            all.free.pop_back();
        }
    }
    if (scratch_ == nullptr) scratch_ = std::make_unique<Scratch>();
}

Lease::~Lease() {
    FreeList& all = list();
    const std::lock_guard<std::mutex> lock(all.mutex);
    try {
        all.free.push_back(std::move(scratch_));
    } catch (...) {  // no memory for the list: the block is freed
    }
}

}  // namespace mrem::runtime
