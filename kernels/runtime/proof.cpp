// The contract is in proof.h.
#include "proof.h"

#include <algorithm>

namespace mrem::runtime {

namespace {

constexpr std::size_t kLanes = kStepBytes / 2;
constexpr std::size_t kLongest = 252;  // a multiple of kGroup that a byte holds

// What a run adds up to in every lane: positive and negative weights apart.
struct Load {
    int above[kLanes], below[kLanes];

    bool fits() const {
        int most = 0;
        for (std::size_t i = 0; i < kLanes; ++i) most = std::max(most, std::max(above[i], below[i]));
        return most <= kMostWeight;
    }
    void add(const std::int8_t* b, std::size_t quads) {
        for (std::size_t at = 0; at < quads; ++at, b += kStepBytes) {
            for (std::size_t i = 0; i < kLanes; ++i) {
                const int w0 = b[2 * i], w1 = b[2 * i + 1], up = std::max(w0, 0) + std::max(w1, 0);
                above[i] += up;
                below[i] += up - w0 - w1;
            }
        }
    }
};

}  // namespace

bool append_runs(const std::int8_t* b, std::size_t quads, std::vector<std::uint8_t>* lengths) {
    for (std::size_t left = quads; left > 0;) {
        Load load{};
        std::size_t run = 0;
        // By groups, as long as they fit; single quads only where a first group does not.
        for (const std::size_t unit : {kGroup, std::size_t{1}}) {
            while (run < std::min(left, kLongest)) {
                Load more = load;
                const std::size_t step = std::min(unit, left - run);
                more.add(b + run * kStepBytes, step);
                if (!more.fits()) break;
                load = more;
                run += step;
            }
            if (run > 0) break;
        }
        if (run == 0) return false;
        lengths->push_back(static_cast<std::uint8_t>(run));
        b += run * kStepBytes;
        left -= run;
    }
    return true;
}

}  // namespace mrem::runtime
