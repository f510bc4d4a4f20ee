#include "paths.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvasir {

#if defined(__x86_64__)
// Linux gives a process the registers of tiles when it asks (Documentation/arch/x86/xstate.rst in its source).
static bool may_use_tiles() {
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#endif

std::vector<Candidate> candidates() {
#if defined(__x86_64__)
    // These also ask the operating system whether it saves the registers.
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_amx = has_avx512 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
    return {{amx_path, has_amx && may_use_tiles()}, {avx512_path, has_avx512}, {avx2_path, has_avx2}, {scalar_path, true}};
#elif defined(__aarch64__)
    constexpr unsigned long dot_product = 1 << 20;  // HWCAP_ASIMDDP
    return {{neon_path, (getauxval(AT_HWCAP) & dot_product) != 0}, {scalar_path, true}};
#else
    return {{scalar_path, true}};
#endif
}

}  // namespace kvasir
