// The gradients of a batch, the occurrences of each row side by side: how they are summed, once for each row,
// in the order of the batch.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "values/elements.h"

// Before a loop of many steps: some loads at once.
#if defined(__CUDA_ARCH__)
#define KVTABLE_UNROLL_4 _Pragma("unroll 4")
#else
#define KVTABLE_UNROLL_4
#endif

namespace kvtable {

// A position s stands for one occurrence of a row in the batch; positions of equal rows adjoin, in the order
// of the batch.
struct BatchGradients {
  const uint32_t* row_of = nullptr;    // (n)
  const uint32_t* place_of = nullptr;  // (n) in the batch; null: position s is place s, and all rows differ
  uint64_t n = 0;
  const void* gradients = nullptr;  // (n, dim) in the order of the batch
  int64_t dim = 0;

  KVTABLE_HOST_DEVICE uint64_t PlaceOf(uint64_t s) const { return place_of == nullptr ? s : place_of[s]; }

  // Whether the row's first occurrence is here.
  KVTABLE_HOST_DEVICE bool IsFirst(uint64_t s) const {
    return s < n && (place_of == nullptr || s == 0 || row_of[s - 1] != row_of[s]);
  }

  // Where the occurrences end that begin here.
  KVTABLE_HOST_DEVICE uint64_t EndOf(uint64_t s) const {
    uint64_t end = s + 1;
    if (place_of == nullptr) return end;
    const uint32_t row = row_of[s];
    while (end < n && row_of[end] == row) ++end;
    return end;
  }

  // Sums the elements first, first + stride, ... of the occurrences; zeros where there is no such element.
  template <class T, int kHeld>
  KVTABLE_HOST_DEVICE void Sum(uint64_t s, uint64_t end, int64_t first, int64_t stride,
                               typename Element<T>::Compute (&sum)[kHeld]) const {
    const T* const all = static_cast<const T*>(gradients);
    const T* const here = all + PlaceOf(s) * static_cast<uint64_t>(dim);
    KVTABLE_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      sum[j] = first + j * stride < dim ? Element<T>::Load(here[first + j * stride]) : 0;
    }
    KVTABLE_UNROLL_4
    for (uint64_t t = s + 1; t < end; ++t) {
      const T* const next = all + place_of[t] * static_cast<uint64_t>(dim);
      KVTABLE_UNROLL
      for (int j = 0; j < kHeld; ++j) {
        if (first + j * stride < dim) sum[j] += Element<T>::Load(next[first + j * stride]);
      }
    }
  }
};

}  // namespace kvtable
