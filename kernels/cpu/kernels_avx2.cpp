// The microkernels for the target "avx2"; CMakeLists.txt gives this file, and no other, its instructions.
#include "kernels_impl.h"
#include "simd_avx2.h"

namespace mrem {

const Kernels kAvx2Kernels = table<Avx2>("avx2");

}  // namespace mrem
