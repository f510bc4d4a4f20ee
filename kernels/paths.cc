#include "paths.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace kvasir {

std::vector<Candidate> candidates() {
#if defined(__x86_64__)
    // These also ask the operating system whether it saves the registers.
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return {{avx512_path, has_avx512}, {avx2_path, has_avx2}, {scalar_path, true}};
#elif defined(__aarch64__)
    constexpr unsigned long dot_product = 1 << 20;  // HWCAP_ASIMDDP
    return {{neon_path, (getauxval(AT_HWCAP) & dot_product) != 0}, {scalar_path, true}};
#else
    return {{scalar_path, true}};
#endif
}

}  // namespace kvasir
