// Linux lets a process use the tiles of AMX only after it has asked: they enlarge what is saved when threads
// switch.
#include "targets.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mrem::runtime {

bool amx_permitted() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h
    static const bool permitted = [] {
        if (!cpu_features().amx_int8()) return false;
        unsigned long granted = 0;
        return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 &&
               syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1) != 0;
    }();
    return permitted;
#else
    return false;
#endif
}

}  // namespace mrem::runtime
