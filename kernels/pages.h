// Memory that is read once.
#pragma once

#include <cstddef>

namespace kvasir {

// Give the pages of unchanged, mapped files back to the system, which reads them again if they are needed. ONNX Runtime
// maps external weights; once they are packed, nothing reads most of them. Other memory stays as it is.
void give_back(const void* data, size_t bytes);

}  // namespace kvasir
