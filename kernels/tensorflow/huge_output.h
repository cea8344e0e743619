// Huge pages for large outputs.
#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace kvtools {

// malloc gets an output of tens of megabytes fresh from the system each time, and then its 4 KiB pages cost
// more than the rows that are written to them. Asks for 2 MiB pages; where the system has none, nothing
// changes.
inline void WantHugePages(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& output) {
  if (ctx->op_device_context() != nullptr) return;  // it lies in a GPU's memory
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(output.data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + output.TotalBytes()) / kHugePage * kHugePage;
  if (last > first + kHugePage) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace kvtools
