// Kernel bodies that look keys up and change nothing.
//
// A body is called as body(lanes, first): lane l has key first + l, if there are so many.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "batch_keys.h"
#include "copy_rows.h"
#include "device_index.h"
#include "device_initial_value.h"
#include "device_rows.h"
#include "kvtable/table.h"

namespace kvtable {

// What a row's column holds for keys that are not there.
struct MissingValue {
  Missing missing = Missing::kZeros;
  DeviceInitialValue initial;      // kInitial
  const char* defaults = nullptr;  // kDefault
  uint64_t num_defaults = 0;

  // Where it lies ready; null for zeros and for drawn values.
  KVTABLE_HOST_DEVICE const char* Ready(uint64_t key, uint64_t i) const {
    if (missing == Missing::kInitial) return initial.Ready(key);
    if (missing == Missing::kDefault) {
      return defaults + i % num_defaults * static_cast<uint64_t>(initial.value_bytes);
    }
    return nullptr;
  }
};

// Copies a column of each key's row.
struct GatherBody {
  BatchKeys keys;
  DeviceIndex index;
  DeviceRows rows;
  const uint32_t* numbers;  // (n) or null: the keys' rows, where they are known
  MissingValue missing;
  int64_t offset;  // of the column in a row
  int64_t bytes;
  int alignment;
  char* out;    // (n, width of column)
  bool* found;  // (n) or null

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const char* from = nullptr;
    char* to = nullptr;
    uint64_t key = 0;
    bool draws = false;
    if (i < keys.n) {
      key = keys.At(i);
      to = out + i * static_cast<uint64_t>(bytes);
      const uint32_t row = numbers != nullptr ? numbers[i] : index.Find(key);
      if (found != nullptr) found[i] = row != kNoRow;
      from = row != kNoRow ? rows.Row(row) + offset : missing.Ready(key, i);
      draws = row == kNoRow && missing.missing == Missing::kInitial && missing.initial.IsDrawn() &&
              !missing.initial.IsPadding(key);
    }
    CopyRows(lanes, draws ? nullptr : to, from, bytes, alignment);
    if (lanes.Any(draws)) missing.initial.FillDrawn(lanes, key, draws ? to : nullptr);
  }
};

// Where each key's row is; a null pointer and kNoRow where it is missing. Each output may be null.
struct LocateBody {
  BatchKeys keys;
  DeviceIndex index;
  DeviceRows rows;
  uint32_t* numbers;   // (n)
  void** pointers;     // (n)
  bool* found;         // (n)
  uint32_t* freqs;     // (n); zeros where missing
  uint32_t* versions;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= keys.n) return;
    const uint32_t row = index.Find(keys.At(i));
    const bool is_there = row != kNoRow;
    if (numbers != nullptr) numbers[i] = row;
    if (pointers != nullptr) pointers[i] = is_there ? rows.Row(row) : nullptr;
    if (found != nullptr) found[i] = is_there;
    if (freqs == nullptr && versions == nullptr) return;
    const DeviceStamp stamp = is_there ? *rows.StampOf(row) : DeviceStamp{0, 0};
    if (freqs != nullptr) freqs[i] = stamp.frequency;
    if (versions != nullptr) versions[i] = stamp.version;
  }
};

// Row numbers, for callers.
struct PositionsBody {
  BatchKeys keys;
  DeviceIndex index;
  uint64_t* positions;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= keys.n) return;
    const uint32_t row = index.Find(keys.At(i));
    positions[i] = row == kNoRow ? kNoPosition : row;
  }
};

// Finds the rows of keys that an inserting launch left kPending: their first occurrences have them now.
struct ResolveBody {
  BatchKeys keys;
  DeviceIndex index;
  uint32_t* numbers;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < keys.n && numbers[i] == kPending) numbers[i] = index.Find(keys.At(i));
  }
};

// The addresses of rows whose numbers are known; null for kNoRow.
struct PointersBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  void** out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n) out[i] = numbers[i] == kNoRow ? nullptr : rows.Row(numbers[i]);
  }
};

// Counts the occurrences of keys that are not there.
struct CountMissingBody {
  BatchKeys keys;
  DeviceIndex index;
  uint32_t* count;  // 0 at first

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    lanes.Count(i < keys.n && index.Find(keys.At(i)) == kNoRow, count);
  }
};

// Copies a column of rows whose numbers are known; zeros for kNoRow.
struct GatherRowsBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  const uint32_t* limit;  // may be null: the number of rows, where a launch before has counted them
  int64_t offset;         // of the column in a row
  int64_t bytes;
  int alignment;
  char* out;  // (n, width of column)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const char* from = nullptr;
    char* to = nullptr;
    if (i < n && (limit == nullptr || i < *limit)) {
      to = out + i * static_cast<uint64_t>(bytes);
      if (numbers[i] != kNoRow) from = rows.Row(numbers[i]) + offset;
    }
    CopyRows(lanes, to, from, bytes, alignment);
  }
};

}  // namespace kvtable
