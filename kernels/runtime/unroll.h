// MREM_UNROLLED in front of a loop with a constant count: written out, so that an array which it indexes can
// stay in registers.
#pragma once

#if defined(__clang__)
#define MREM_UNROLLED _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define MREM_UNROLLED _Pragma("GCC unroll 32")
#else
#define MREM_UNROLLED
#endif
