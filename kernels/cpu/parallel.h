// A loop over blocks, by several threads where OpenMP was found at build time.
#pragma once

#include <cstddef>

namespace mrem {

// Fewer blocks than this stay in one thread. They take less than a millisecond: where another program shares
// a core, waiting for the second thread takes longer than the work that it would do.
constexpr std::size_t kWorthSharing = 64;

// body(block) for every block, in any thread and order. `body` must not throw. Blocks are handed out as
// threads become free, so that a thread that has to share its core does fewer of them.
template <class Body>
void for_each_block(std::size_t blocks, int threads, const Body& body) {
#ifdef _OPENMP
    if (threads > 1 && blocks >= kWorthSharing) {
        const auto count = static_cast<std::ptrdiff_t>(blocks);  // OpenMP wants a signed index
        const int used = count < threads ? static_cast<int>(count) : threads;
#pragma omp parallel for num_threads(used) schedule(dynamic, 4)
        for (std::ptrdiff_t block = 0; block < count; ++block) body(static_cast<std::size_t>(block));
        return;
    }
#else
    (void)threads;
#endif
    for (std::size_t block = 0; block < blocks; ++block) body(block);
}

}  // namespace mrem
