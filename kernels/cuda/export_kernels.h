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
#include "lanes.h"
#include "row_predicate.h"

namespace kvtable {

// Rows that were written after an era (row_changes.h).
struct ChangedSince {
  uint32_t era = 0;
  uint32_t* born = nullptr;  // (n) or null: the era of each row's birth
};

// Lane l has the keys at home in bucket `first_home + first + l`, wherever they were put.
struct ListBody {
  static constexpr bool kWholeBlocks = true;

  DeviceIndex index;
  DeviceRows rows;
  RowPredicate predicate;
  bool only_changed;       // of these the rows that were written since
  uint32_t changed_since;  // by the era of its last write
  uint64_t first_hash;     // the range; both are in it
  uint64_t last_hash;
  uint64_t first_home;  // of the range
  uint64_t last_home;
  uint32_t capacity;  // of the outputs; more rows are counted only
  uint32_t* count;    // 0 at first
  uint32_t* numbers;  // rows
  void* keys;         // may be null
  bool narrow;        // keys are int32_t

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t home = first_home + first + lanes.lane();
    uint32_t mine = 0;
    ForEachOf(home, [&](uint64_t, uint32_t) { ++mine; });
    uint32_t n = lanes.CountInBlock(mine, count);
    if (mine == 0 || n >= capacity) return;
    ForEachOf(home, [&](uint64_t key, uint32_t row) { List(key, row, n++); });
  }

 private:
  // Calls visit(key, row) with each row that is meant of a home, in the order of buckets.
  template <class Visit>
  KVTABLE_HOST_DEVICE void ForEachOf(uint64_t home, const Visit& visit) const {
    if (home > last_home) return;
    uint64_t at = home;
    do {
      const DeviceBucket bucket = index.buckets[at];  // as a whole
      KVTABLE_UNROLL
      for (int s = 0; s < DeviceBucket::kKeys; ++s) {
        if ((bucket.meta >> s & 1) != 0 && Means(bucket.keys[s], bucket.rows[s], home)) {
          visit(bucket.keys[s], bucket.rows[s]);
        }
      }
      if (DeviceBucket::Passed(bucket.meta) == 0) return;
      at = index.After(at);
    } while (at != home);
  }

  KVTABLE_HOST_DEVICE bool Means(uint64_t key, uint32_t row, uint64_t home) const {
    const uint64_t hash = Mix64(key);
    return hash >= first_hash && hash <= last_hash && index.HomeOfHash(hash) == home &&
           Holds(predicate, rows, key, row) &&
           !(only_changed && rows.changes.eras[row].written <= changed_since);
  }

  KVTABLE_HOST_DEVICE void List(uint64_t key, uint32_t row, uint32_t n) const {
    if (n >= capacity) return;
    numbers[n] = row;
    if (keys != nullptr) StoreKey(key, keys, narrow, n);
  }
};

// What is kept beside listed rows. They lie anywhere: lane l has one, first + l, so that all lanes wait at once.
struct ListedBody {
  DeviceRows rows;
  uint64_t n;
  const uint32_t* numbers;
  uint32_t* freqs;  // each may be null
  uint32_t* versions;
  uint64_t* scores;
  uint64_t* orders;
  uint32_t* born;  // the era of each row's birth

  KVTABLE_HOST_DEVICE bool HasNothing() const {
    return freqs == nullptr && versions == nullptr && scores == nullptr && orders == nullptr &&
           born == nullptr;
  }

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n) return;
    const uint32_t row = numbers[i];
    if (freqs != nullptr) freqs[i] = rows.StampOf(row)->frequency;
    if (versions != nullptr) versions[i] = rows.StampOf(row)->version;
    if (scores != nullptr) scores[i] = ScoreOf(rows, row);
    if (orders != nullptr) orders[i] = OrderOf(rows, row);
    if (born != nullptr) born[i] = rows.changes.eras[row].born;
  }
};

}  // namespace kvtable
