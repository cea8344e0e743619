// The kernel body that makes splits of the row ids of sparse indices.
#pragma once

#include <cstdint>

#include "bag_splits.h"
#include "base/host_device.h"

namespace kvtable {

// Lane l has split first + l, and row id first + l.
struct SplitsBody {
  const int64_t* row_ids;  // (n), each `stride` further than the one before
  uint64_t stride;
  uint64_t n;
  uint64_t bags;
  int64_t* splits;  // (bags + 1)
  uint64_t* mistake;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n) {
      const int64_t id = row_ids[i * stride];
      const bool in_range = id >= 0 && static_cast<uint64_t>(id) < bags;
      if (!in_range || (i > 0 && row_ids[(i - 1) * stride] > id)) {
        BagMistake::Note(mistake, BagMistake::kRowIds, i);
      }
    }
    if (i <= bags) splits[i] = static_cast<int64_t>(i == 0 ? 0 : i == bags ? n : FirstNotBelow(i));
  }

 private:
  KVTABLE_HOST_DEVICE uint64_t FirstNotBelow(uint64_t bag) const {
    uint64_t low = 0;
    uint64_t high = n;
    while (low < high) {
      const uint64_t middle = low + (high - low) / 2;
      if (row_ids[middle * stride] < static_cast<int64_t>(bag)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace kvtable
