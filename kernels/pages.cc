#include "pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace kvasir {

// Whether dropping pages loses nothing: those in memory are of a file, as Linux's Documentation/admin-guide/mm/pagemap.rst
// tells it. A page of a private mapping that was written is not.
static bool are_of_files(uintptr_t first, uintptr_t last) {
    constexpr uint64_t is_present = uint64_t(1) << 63, is_swapped = uint64_t(1) << 62, is_of_file = uint64_t(1) << 61;
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    bool result = pagemap >= 0;
    uint64_t entries[512];
    while (result && first < last) {
        const size_t count = last - first < 512 ? last - first : 512;
        result = pread(pagemap, entries, count * sizeof(uint64_t), off_t(first * sizeof(uint64_t))) ==
                 ssize_t(count * sizeof(uint64_t));
        for (size_t i = 0; result && i < count; ++i)
            result = !(entries[i] & (is_present | is_swapped)) || (entries[i] & is_of_file);
        first += count;
    }
    if (pagemap >= 0)
        close(pagemap);
    return result;
}

void give_back(const void* data, size_t bytes) {
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), start = uintptr_t(data);
    const uintptr_t first = (start + page - 1) / page, last = (start + bytes) / page;
    if (first < last && are_of_files(first, last))
        madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_DONTNEED);
}

}  // namespace kvasir
