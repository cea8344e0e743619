// The rows of a table in device memory, and the columns beside them. A row's number is its place, whose
// address stays until the slots change; a key keeps its number for life, but for hot rows that change places
// with cold ones (hot_rows_kernels.h).
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "row_changes.h"
#include "row_ranks.h"

namespace kvtable {

// What is kept beside each row. The row's key is in the index only.
struct alignas(8) DeviceStamp {
  uint32_t frequency;
  uint32_t version;
};

// Rows lie in slabs of the same number of rows, a power of two: in device memory or, beyond what the table
// may use of it, in pinned host memory. Stamps are in device memory always.
struct alignas(16) DeviceSlab {
  char* rows;
  DeviceStamp* stamps;
};

// Where a row and its stamp lie.
struct PlacedRow {
  char* row;
  DeviceStamp* stamp;
};

// How many rows there are. Kernels read it, and count in `fresh` and `freed` what they take and give back; a
// launch of its own enters that in the others afterwards (see insert_kernels.h), so that they stand still.
struct RowCounters {
  uint32_t high_water;  // row numbers ever handed out: [0, high_water)
  uint32_t free;        // of these, in the list of free rows
  uint32_t fresh;       // rows that the present launch has taken
  uint32_t freed;       // rows that it has given back
};

// The rows as kernels see them: a view that owns nothing.
struct DeviceRows {
  const DeviceSlab* slabs = nullptr;
  RowCounters* counters = nullptr;
  uint32_t* free_rows = nullptr;  // room for all that may be freed
  int64_t row_bytes = 0;
  int slab_bits = 0;         // log2 of a slab's rows
  DeviceRanks ranks;         // of a bounded table
  DeviceRowChanges changes;  // of a table that tracks them

  KVTABLE_HOST_DEVICE char* Row(uint32_t row) const {
    return slabs[row >> slab_bits].rows + static_cast<int64_t>(row & ((1u << slab_bits) - 1)) * row_bytes;
  }
  // Both at once: one load tells them.
  KVTABLE_HOST_DEVICE PlacedRow At(uint32_t row) const {
    const DeviceSlab slab = slabs[row >> slab_bits];
    const uint32_t place = row & ((1u << slab_bits) - 1);
    return {slab.rows + static_cast<int64_t>(place) * row_bytes, slab.stamps + place};
  }
  KVTABLE_HOST_DEVICE DeviceStamp* StampOf(uint32_t row) const {
    return slabs[row >> slab_bits].stamps + (row & ((1u << slab_bits) - 1));
  }

  // The row of the n-th key that is new in the present launch.
  KVTABLE_HOST_DEVICE uint32_t Fresh(uint32_t n) const {
    const uint32_t free = counters->free;
    return n < free ? free_rows[free - 1 - n] : counters->high_water + (n - free);
  }
};

}  // namespace kvtable
