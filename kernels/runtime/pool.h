// Threads, as the blocks see them.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>

namespace mrem::runtime {

class Pool {
  public:
    virtual ~Pool() = default;

    // How many threads may work at once, the caller included.
    virtual std::size_t threads() const = 0;

    // body(task, context) for every task < tasks, in any thread and order; returns when all have run. `body`
    // does not throw.
    virtual void run(std::size_t tasks, void (*body)(std::size_t task, void* context), void* context) = 0;

    template <class Body>
    void parallel_for(std::size_t tasks, const Body& body) {
        if (tasks == 1) return body(0);
        run(
            tasks, [](std::size_t task, void* context) { (*static_cast<const Body*>(context))(task); },
            const_cast<void*>(static_cast<const void*>(&body)));
    }
};

// Everything in the calling thread.
class OneThread final : public Pool {
  public:
    std::size_t threads() const override { return 1; }
    void run(std::size_t tasks, void (*body)(std::size_t, void*), void* context) override {
        for (std::size_t task = 0; task < tasks; ++task) body(task, context);
    }
};

// Pool::parallel_for for tasks that may run out of memory: throws std::bad_alloc afterwards.
template <class Body>
void share(Pool& pool, std::size_t tasks, const Body& body) {
    std::atomic<bool> failed{false};
    pool.parallel_for(tasks, [&](std::size_t task) {
        try {
            body(task);
        } catch (const std::bad_alloc&) {
            failed.store(true, std::memory_order_relaxed);
        }
    });
    if (failed.load()) throw std::bad_alloc();
}

}  // namespace mrem::runtime
