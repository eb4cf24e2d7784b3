// The microkernels for the target "avx512"; CMakeLists.txt gives this file, and no other, its instructions.
#include "kernels_impl.h"
#include "simd_avx512.h"

namespace mrem {

const Kernels kAvx512Kernels = table<Avx512>("avx512");

}  // namespace mrem
