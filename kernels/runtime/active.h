// The kernels that this process uses.
#pragma once

#include "float_kernels.h"

namespace mrem::runtime {

const FloatKernels& active_floats();
const char* active_target();  // its name

}  // namespace mrem::runtime
