// The microkernels for the target "scalar".
#include "gemm_plain.h"

namespace mrem::runtime {

const GemmKernels kScalarGemm = {"scalar",
                                 4,
                                 1,
                                 256,
                                 1,
                                 false,
                                 plain_unpack,
                                 nullptr,
                                 0,
                                 0,
                                 plain_tile,
                                 nullptr,
                                 plain_dequantize,
                                 plain_pack_keys,
                                 plain_pack_values,
                                 plain_float_product};

}  // namespace mrem::runtime
