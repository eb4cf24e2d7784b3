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

    bool avx2() const { return cpuid_avx2 && os_avx; }
    bool avx512f() const { return cpuid_avx512f && os_avx512; }
};

// Reads them once; all false if the processor is not x86.
const CpuFeatures& cpu_features();

}  // namespace mrem
