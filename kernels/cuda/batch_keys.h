// The keys of a batch as kernels read them, and which one is a lane's own.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "values/elements.h"

namespace kvtable {

struct BatchKeys {
  const void* keys = nullptr;  // (n) int32_t where `narrow`, else 64 bits
  uint64_t n = 0;
  bool narrow = false;

  // As the index holds it.
  KVTABLE_HOST_DEVICE uint64_t At(uint64_t i) const {
    return narrow ? WidenKey(static_cast<const int32_t*>(keys)[i]) : static_cast<const uint64_t*>(keys)[i];
  }
};

// Writes a key as the table's key type.
KVTABLE_HOST_DEVICE inline void StoreKey(uint64_t key, void* keys, bool narrow, uint64_t i) {
  if (narrow) {
    static_cast<int32_t*>(keys)[i] = static_cast<int32_t>(key);
  } else {
    static_cast<uint64_t*>(keys)[i] = key;
  }
}

}  // namespace kvtable
