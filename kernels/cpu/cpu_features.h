// What this processor and this operating system together can run.
//
// Note: CPUID alone does not say that an instruction may be used. The operating system must also save the
// wide registers when it switches threads, which XCR0 says. On a virtual machine or an old kernel the two can
// differ, and the first wide instruction would then end the process.
#pragma once

namespace mrem {

struct CpuFeatures {
    bool cpuid_avx2;     // the processor announces AVX2,
    bool cpuid_avx512f;  // and AVX-512 Foundation
    bool os_avx;         // the operating system saves the 256-bit registers,
    bool os_avx512;      // and the 512-bit and mask registers
    bool cpuid_fma;
    bool cpuid_avx_vnni;
    bool cpuid_avx512_vnni;  // with the parts F, BW, DQ and VL
    bool cpuid_amx_int8;     // with the tiles
    bool os_amx;             // the operating system saves tiles, once a process has asked for them

    bool avx2() const { return cpuid_avx2 && os_avx; }
    bool avx512f() const { return cpuid_avx512f && os_avx512; }
    bool avx2_fma() const { return avx2() && cpuid_fma; }
    bool avx_vnni() const { return avx2_fma() && cpuid_avx_vnni; }
    bool avx512_vnni() const { return avx512f() && avx2_fma() && cpuid_avx512_vnni; }
    bool amx_int8() const { return cpuid_amx_int8 && os_amx; }
};

// Reads them once; all false if the processor is not x86.
const CpuFeatures& cpu_features();

}  // namespace mrem
