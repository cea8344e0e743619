// The kernel body that lists what is in a range of buckets. Copying the rows' columns comes after
// (GatherRowsBody).
#pragma once

#include <cstdint>

#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "host_device.h"
#include "row_predicate.h"

namespace kvtable {

// Lane l has bucket begin + first + l. The outputs have room for all keys of the buckets.
struct ListBody {
  DeviceIndex index;
  DeviceRows rows;
  RowPredicate predicate;
  uint64_t begin;
  uint64_t end;
  uint32_t* count;    // 0 at first
  uint32_t* numbers;  // rows
  void* keys;         // each may be null
  bool narrow;        // keys are int32_t
  uint32_t* freqs;
  uint32_t* versions;
  uint64_t* scores;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = begin + first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      uint32_t row = kNoRow;
      uint64_t key = 0;
      DeviceStamp stamp{0, 0};
      if (b < end && (index.buckets[b].meta >> s & 1) != 0) {
        row = index.buckets[b].rows[s];
        key = index.buckets[b].keys[s];
        stamp = *rows.StampOf(row);
        if (!Holds(predicate, stamp)) row = kNoRow;
      }
      const uint32_t n = lanes.Count(row != kNoRow, count);
      if (row == kNoRow) continue;
      numbers[n] = row;
      if (keys != nullptr) StoreKey(key, keys, narrow, n);
      if (freqs != nullptr) freqs[n] = stamp.frequency;
      if (versions != nullptr) versions[n] = stamp.version;
      if (scores != nullptr) scores[n] = rows.ranks.ranks == nullptr ? 0 : rows.ranks.ranks[row].score;
    }
  }
};

}  // namespace kvtable
