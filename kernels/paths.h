// The paths of this build and which of them this machine can run.
#pragma once

#include <vector>

#include "path.h"

namespace kvasir {

struct Candidate {
    const Path& path;
    bool is_usable;  // by this CPU and its operating system
};

// The fastest first.
std::vector<Candidate> candidates();

}  // namespace kvasir
