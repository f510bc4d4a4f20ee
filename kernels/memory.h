// Arrays whose elements begin on cache lines, as the aligned loads of the products need.
#pragma once

#include <cstddef>
#include <vector>

namespace kvasir {

struct alignas(64) CacheLine {
    unsigned char bytes[64];
};

using Lines = std::vector<CacheLine>;

inline size_t round_up(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

inline Lines lines_of(size_t bytes) { return Lines(round_up(bytes, sizeof(CacheLine)) / sizeof(CacheLine)); }

}  // namespace kvasir
