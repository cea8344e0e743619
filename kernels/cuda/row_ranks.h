// The ranks of a bounded table's rows in device memory: which goes first.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvtable {

// A row's place among all: by score, then by order, as eviction/rank.h has it. In a row's entry two flags lie above
// the order; without them it is what is compared.
struct alignas(16) DeviceRank {
  static constexpr uint64_t kUnlisted = uint64_t{1} << 63;  // not in the list of the lowest (evict_kernels.h)
  static constexpr uint64_t kOwn = uint64_t{1} << 62;       // of the present batch (kCustom only)
  static constexpr uint64_t kOrder = kOwn - 1;

  uint64_t score;
  uint64_t order;  // kOrder: the row has no rank. It is not there, or its first touch is to come

  KVTABLE_HOST_DEVICE DeviceRank Bare() const { return {score, order & kOrder}; }
  KVTABLE_HOST_DEVICE bool IsRanked() const { return (order & kOrder) != kOrder; }

  KVTABLE_HOST_DEVICE friend bool operator<(const DeviceRank& a, const DeviceRank& b) {
    return a.score < b.score || (a.score == b.score && a.order < b.order);
  }
};

// Above every row.
KVTABLE_HOST_DEVICE inline DeviceRank HighestRank() { return {UINT64_MAX, DeviceRank::kOrder}; }

// By row number. A view that owns nothing. Memory is all bits set at first.
struct DeviceRanks {
  DeviceRank* ranks = nullptr;  // null: the table is not bounded
  uint64_t* keys = nullptr;     // of rows that are there

  // A row comes to be, with a score of 0 and no order yet.
  KVTABLE_HOST_DEVICE void Begin(uint32_t row, uint64_t key) const {
    if (ranks == nullptr) return;
    ranks[row].score = 0;
    keys[row] = key;
  }
  // A row goes. It stays in the list, if it is there, for the next key.
  KVTABLE_HOST_DEVICE void End(uint32_t row) const {
    if (ranks != nullptr) ranks[row] = {UINT64_MAX, ranks[row].order | ~DeviceRank::kUnlisted};
  }
};

}  // namespace kvtable
