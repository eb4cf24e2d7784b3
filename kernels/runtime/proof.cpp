// The contract is in proof.h.
#include "proof.h"

#include <algorithm>

namespace mrem::runtime {

bool append_runs(const std::int8_t* b, std::size_t quads, std::vector<std::uint8_t>* lengths) {
    constexpr std::size_t kLanes = kStepBytes / 2;
    std::int16_t above[kLanes] = {}, below[kLanes] = {};
    std::uint8_t run = 0;
    for (std::size_t quad = 0; quad < quads; ++quad, b += kStepBytes) {
        std::int16_t plus[kLanes], minus[kLanes];
        int alone = 0, together = 0;
        for (std::size_t i = 0; i < kLanes; ++i) {
            const int w0 = b[2 * i], w1 = b[2 * i + 1];
            const int up = std::max(w0, 0) + std::max(w1, 0), down = up - w0 - w1;
            plus[i] = static_cast<std::int16_t>(up);
            minus[i] = static_cast<std::int16_t>(down);
            alone = std::max(alone, std::max(up, down));
            together = std::max(together, std::max(above[i] + up, below[i] + down));
        }
        if (alone > kMostWeight) return false;
        const bool starts = together > kMostWeight || run == 255;
        if (starts) {
            lengths->push_back(run);
            run = 0;
        }
        for (std::size_t i = 0; i < kLanes; ++i) {
            above[i] = static_cast<std::int16_t>((starts ? 0 : above[i]) + plus[i]);
            below[i] = static_cast<std::int16_t>((starts ? 0 : below[i]) + minus[i]);
        }
        ++run;
    }
    if (run > 0) lengths->push_back(run);
    return true;
}

}  // namespace mrem::runtime
