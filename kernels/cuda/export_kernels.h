// The kernel body that lists the rows whose keys have hashes in a range. Copying the rows' columns comes
// after (GatherRowsBody).
//
// Hashes of different keys differ (Mix64 is a bijection), so a range holds as few keys as one likes, and it
// means the same keys however many buckets the index has: that is how an export goes on while a table grows.
#pragma once

#include <cstdint>

#include "base/hash.h"
#include "base/host_device.h"
#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "row_predicate.h"

namespace kvtable {

// Rows that were written after an era (row_changes.h).
struct ChangedSince {
  uint32_t era = 0;
  uint32_t* born = nullptr;  // (n) or null: the era of each row's birth
};

// Lane l has the keys at home in bucket `first_home + first + l`, wherever they were put.
struct ListBody {
  DeviceIndex index;
  DeviceRows rows;
  RowPredicate predicate;
  bool only_changed;  // of these the rows that `changed` says
  ChangedSince changed;
  uint64_t first_hash;  // the range; both are in it
  uint64_t last_hash;
  uint64_t first_home;  // of the range
  uint64_t last_home;
  uint32_t capacity;  // of the outputs; more rows are counted only
  uint32_t* count;    // 0 at first
  uint32_t* numbers;  // rows
  void* keys;         // each may be null
  bool narrow;        // keys are int32_t
  uint32_t* freqs;
  uint32_t* versions;
  uint64_t* scores;
  uint64_t* orders;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t home = first_home + first + lanes.lane();
    bool goes_on = home <= last_home;
    uint64_t at = home;
    while (lanes.Any(goes_on)) {
      const uint32_t meta = goes_on ? index.buckets[at].meta : 0;
      for (int s = 0; s < DeviceBucket::kKeys; ++s) {
        uint32_t row = kNoRow;
        uint64_t key = 0;
        if ((meta >> s & 1) != 0) {
          key = index.buckets[at].keys[s];
          const uint64_t hash = Mix64(key);
          if (hash >= first_hash && hash <= last_hash && index.HomeOfHash(hash) == home) {
            row = index.buckets[at].rows[s];
            if (!Holds(predicate, rows, key, row)) row = kNoRow;
            if (row != kNoRow && only_changed && rows.changes.eras[row].written <= changed.era) row = kNoRow;
          }
        }
        const uint32_t n = lanes.Count(row != kNoRow, count);
        if (row == kNoRow || n >= capacity) continue;
        numbers[n] = row;
        if (keys != nullptr) StoreKey(key, keys, narrow, n);
        if (freqs != nullptr) freqs[n] = rows.StampOf(row)->frequency;
        if (versions != nullptr) versions[n] = rows.StampOf(row)->version;
        if (scores != nullptr) scores[n] = ScoreOf(rows, row);
        if (orders != nullptr) orders[n] = OrderOf(rows, row);
        if (changed.born != nullptr) changed.born[n] = rows.changes.eras[row].born;
      }
      at = index.After(at);
      goes_on = goes_on && DeviceBucket::Passed(meta) != 0 && at != home;
    }
  }
};

}  // namespace kvtable
