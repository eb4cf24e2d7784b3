// Asks for a line of memory before it is read.
#pragma once

namespace mrem::runtime {

// `again`: it will be read more than once, so that it shall stay in the caches.
template <bool again>
inline void prefetch([[maybe_unused]] const void* address) {
#if defined(__GNUC__)
    __builtin_prefetch(address, 0, again ? 3 : 0);
#endif
}

}  // namespace mrem::runtime
