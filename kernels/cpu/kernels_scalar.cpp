// The microkernels for the target "scalar"; CMakeLists.txt gives this file, and no other, its instructions.
#include "kernels_impl.h"
#include "simd_scalar.h"

namespace mrem {

const Kernels kScalarKernels = table<Scalar>("scalar");

}  // namespace mrem
