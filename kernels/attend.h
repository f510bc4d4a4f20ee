// A run of attention once everything is checked: its tasks, and the threads that take them.
#pragma once

#include <vector>

#include "path.h"
#include "run.h"

namespace kvasir {

// Append tokens from [tokens][row_width] to caches, and write what they attend to to out [tokens][H][D].
void attend(const Run&, const Attention&, const Heads&, const Caches&, const std::vector<Stretch>&, size_t tokens,
            const float* from, float* out);

}  // namespace kvasir
