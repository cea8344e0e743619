// What changed in a table in device memory: beside each row when it was last written and when it was born, and
// a list of the keys that went.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/host_device.h"
#include "device_index.h"

namespace kvtable {

// The versions of a table follow one another in eras: from one cut to the next. Era 0 is what was before
// changes were tracked.
struct RowEras {
  uint32_t written;  // the last one in which the row was written, or born
  uint32_t born;
};

struct RemovedKey {
  uint64_t key;
  uint32_t born;  // the era of its row's birth
  uint32_t unused;
};

// By row number. A view that owns nothing.
struct DeviceRowChanges {
  RowEras* eras = nullptr;        // null: changes are not tracked
  RemovedKey* removed = nullptr;  // of this era, in no order: rows that were there when it began
  uint32_t* count = nullptr;      // of them; what is beyond the capacity is counted only
  uint32_t capacity = 0;
  uint32_t era = 0;  // that is open

  KVTABLE_HOST_DEVICE void NoteBirth(uint32_t row) const {
    if (eras != nullptr) eras[row] = {era, era};
  }
  KVTABLE_HOST_DEVICE void NoteWrite(uint32_t row) const {
    if (eras != nullptr) StoreRelaxed(&eras[row].written, era);
  }
  // In each lane whose row is not kNoRow it goes. All lanes take part.
  template <class Lanes>
  KVTABLE_HOST_DEVICE void NoteEnd(const Lanes& lanes, uint32_t row, uint64_t key) const {
    if (eras == nullptr) return;
    const uint32_t born = row == kNoRow ? era : eras[row].born;
    const uint32_t n = lanes.Count(born != era, count);
    if (born != era && n < capacity) removed[n] = {key, born, 0};
  }
  // Two rows change places.
  KVTABLE_HOST_DEVICE void Swap(uint32_t a, uint32_t b) const {
    if (eras == nullptr) return;
    const RowEras of_a = eras[a];
    eras[a] = eras[b];
    eras[b] = of_a;
  }
};

// Notes that rows are written; kNoRow is left out.
struct NoteWritesBody {
  DeviceRowChanges changes;
  const uint32_t* numbers;  // (n)
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n && numbers[i] != kNoRow) changes.NoteWrite(numbers[i]);
  }
};

}  // namespace kvtable
