// Kernel bodies that remove keys. CountRowsBody (insert_kernels.h) enters the freed rows in the counters.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "row_predicate.h"

namespace kvtable {

// Lists the row of each lane that has freed one, which was `key`'s and has place n among those of the launch.
KVTABLE_HOST_DEVICE inline void ListFreed(const DeviceRows& rows, uint32_t row, uint32_t n) {
  if (row == kNoRow) return;
  rows.free_rows[rows.counters->free + n] = row;
  rows.ranks.End(row);
}

// The same for a whole warp; all lanes take part.
template <class Lanes>
KVTABLE_HOST_DEVICE inline void GiveBack(const Lanes& lanes, const DeviceRows& rows, uint32_t row,
                                         uint64_t key) {
  rows.changes.NoteEnd(lanes, row, key);
  ListFreed(rows, row, lanes.Count(row != kNoRow, &rows.counters->freed));
}

// The same in a body for whole blocks, all lanes of which take part.
template <class Lanes>
KVTABLE_HOST_DEVICE inline void GiveBackInBlock(const Lanes& lanes, const DeviceRows& rows, uint32_t row,
                                                uint64_t key) {
  rows.changes.NoteEnd(lanes, row, key);
  ListFreed(rows, row, lanes.CountInBlock(row != kNoRow ? 1 : 0, &rows.counters->freed));
}

struct EraseBody {
  static constexpr bool kWholeBlocks = true;

  BatchKeys keys;
  DeviceIndex index;
  DeviceRows rows;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint64_t key = i < keys.n ? keys.At(i) : 0;
    GiveBackInBlock(lanes, rows, i < keys.n ? index.Erase(key) : kNoRow, key);
  }
};

// Lane l has bucket first + l.
struct EraseIfBody {
  DeviceIndex index;
  DeviceRows rows;
  RowPredicate predicate;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      uint32_t freed = kNoRow;
      uint64_t key = 0;
      if (b < index.num_buckets && (LoadRelaxed(&index.buckets[b].meta) >> s & 1) != 0) {
        const uint32_t row = index.buckets[b].rows[s];
        key = index.buckets[b].keys[s];
        if (Holds(predicate, rows, key, row) && index.EraseAt(b, s)) freed = row;
      }
      GiveBack(lanes, rows, freed, key);
    }
  }
};

}  // namespace kvtable
