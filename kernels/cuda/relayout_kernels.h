// Kernel bodies that give rows another layout where they lie: a group of rows at a time is copied aside, and
// comes back column by column.
//
// Rows go up in their memory where they become wider, and down where they do not; RowBlocks fills its blocks
// in order, with at least or at most as many slabs as before. So where groups are taken from the last row
// down, or from the first row up, what a group writes is memory that only it and the groups before it had.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "copy_rows.h"
#include "device_rows.h"

namespace kvtable {

// Copies rows first_row + (0 ... n - 1) aside.
struct StageRowsBody {
  DeviceRows rows;
  uint64_t first_row;
  uint64_t n;
  int alignment;
  char* stage;  // (n, row)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const bool is_there = i < n;
    char* const to = is_there ? stage + i * static_cast<uint64_t>(rows.row_bytes) : nullptr;
    const char* const from = is_there ? rows.Row(static_cast<uint32_t>(first_row + i)) : nullptr;
    CopyRows(lanes, to, from, rows.row_bytes, alignment);
  }
};

// Writes a column of these rows in their new layout.
struct MoveColumnBody {
  DeviceRows rows;
  uint64_t first_row;
  uint64_t n;
  int64_t offset;  // of the column in a row
  int64_t bytes;
  int alignment;
  const char* from;  // what the first of them gets
  int64_t stride;    // from there to what the next one gets; 0: all the same

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const bool is_there = i < n;
    char* const to = is_there ? rows.Row(static_cast<uint32_t>(first_row + i)) + offset : nullptr;
    CopyRows(lanes, to, is_there ? from + static_cast<int64_t>(i) * stride : nullptr, bytes, alignment);
  }
};

}  // namespace kvtable
