// The most that a target's multiply instructions do with registers alone: what a product can at best attain.
#pragma once

#include <cstring>

namespace mrem::runtime {

struct RegisterLoop {
    void (*run)();    // null where there is none (plain code, AMX that was not asked for)
    double products;  // of one run
};

// `heavy`: as for 8-bit weights, where that is another form (AVX2).
RegisterLoop register_loop(const char* target, bool heavy);

}  // namespace mrem::runtime
