// The most that a target's multiply instructions do with registers alone: what a product can at best attain.
// Loads of operands, unpacking, loops over rows and stores of finished sums are not in it.
#pragma once

#include <cstring>

namespace mrem::runtime {

struct RegisterLoop {
    void (*run)();    // null where there is none (plain code, AMX that was not asked for)
    double products;  // of one run
};

// AVX2 alone has two forms. `run` > 0: sums of 16 bits that are widened and added to memory after so many
// multiplications each. 0: sums of 32 bits, as for 8-bit weights.
RegisterLoop register_loop(const char* target, int run);

}  // namespace mrem::runtime
