// The target "amx" with plain arrays for tiles, for tests on processors without them.
#define MREM_AMX_EMULATED
#include "gemm_amx.cpp"
