// Kernel bodies that insert keys, and give their rows first contents. In this order, a launch each:
//
//   LocateBody     (find_kernels.h) the rows of keys that are there
//   InsertBody     inserts the others; new keys come out in a list, in no particular order
//   PlaceNewBody   gives each new key its row, the slots of it and, where asked to, the initial value
//   CountRowsBody  enters the new rows in the counters
//   ResolveBody    (find_kernels.h) the rows of new keys' other occurrences
//
// and then whatever is done with the rows.
#pragma once

#include <cstdint>

#include "admission/admission_draw.h"
#include "atomics.h"
#include "base/host_device.h"
#include "batch_claims.h"
#include "batch_keys.h"
#include "copy_rows.h"
#include "device_index.h"
#include "device_initial_value.h"
#include "device_rows.h"
#include "kvtable/table.h"

namespace kvtable {

struct InsertBody {
  static constexpr bool kWholeBlocks = true;

  BatchKeys keys;
  bool distinct;  // all keys differ
  AdmissionDraw admission;
  DeviceIndex index;
  DeviceRows rows;
  uint32_t* numbers;   // (n): row, or kNoRow; then row, kPending, or kNoRow where a key is not admitted
  uint32_t* new_keys;  // (n): the first counters->fresh are places in the batch
  Slot* new_slots;     // (n): where these were inserted
  bool* inserted;      // (n) or null: for each occurrence of a key that was new

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    Slot slot = 0;
    bool is_new = false;
    uint32_t row = i < keys.n ? numbers[i] : kNoRow;
    if (i < keys.n && row == kNoRow && admission.Admits(keys.At(i))) {
      if (distinct) {
        slot = index.InsertNew(keys.At(i), kPending);
        is_new = true;
      } else {
        row = index.FindOrInsert(keys.At(i), &slot, &is_new);
      }
    }
    const uint32_t n = lanes.CountInBlock(is_new ? 1 : 0, &rows.counters->fresh);
    if (i >= keys.n) return;
    if (is_new) {
      new_keys[n] = static_cast<uint32_t>(i);
      new_slots[n] = slot;
      row = rows.Fresh(n);
    }
    if (is_new || row == kPending) numbers[i] = row;
    if (inserted != nullptr) inserted[i] = is_new || row == kPending;
  }
};

// What a new row's value is to be.
enum class FirstValue : uint8_t { kInitial, kZeros, kNothing /* for it is written next */ };

struct PlaceNewBody {
  BatchKeys keys;
  DeviceIndex index;
  DeviceRows rows;
  const uint32_t* new_keys;
  const Slot* new_slots;
  DeviceInitialValue initial;
  FirstValue first_value;
  const char* first_slots;  // what the slots of a new row hold, those that copy the value aside
  int value_alignment;
  int slots_alignment;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint32_t fresh = rows.counters->fresh;
    if (first >= fresh) return;
    const uint32_t n = static_cast<uint32_t>(first) + lanes.lane();
    char* row = nullptr;
    uint64_t key = 0;
    if (n < fresh) {
      const uint32_t number = rows.Fresh(n);
      index.buckets[new_slots[n] / 8].rows[new_slots[n] % 8] = number;
      *rows.StampOf(number) = {0, 0};
      row = rows.Row(number);
      key = keys.At(new_keys[n]);
      rows.ranks.Begin(number, key);
      rows.changes.NoteBirth(number);
    }
    const int64_t slot_bytes = rows.row_bytes - initial.value_bytes;
    if (slot_bytes > 0) {
      CopyRows(lanes, row == nullptr ? nullptr : row + initial.value_bytes, first_slots, slot_bytes,
               slots_alignment);
    }
    if (first_value == FirstValue::kNothing) return;
    if (first_value == FirstValue::kInitial && initial.IsDrawn()) {
      initial.FillDrawn(lanes, key, row);
      return;
    }
    const bool has_ready = row != nullptr && first_value == FirstValue::kInitial;
    CopyRows(lanes, row, has_ready ? initial.Ready(key) : nullptr, initial.value_bytes, value_alignment);
  }
};

// In the rows of new keys, copies the value to a slot: one that starts as a copy of it.
struct CopyValueBody {
  DeviceRows rows;
  const uint32_t* numbers;   // (n)
  const uint32_t* new_keys;  // places in the batch
  const uint32_t* num_new;
  int64_t offset;
  int64_t bytes;
  int alignment;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (first >= *num_new) return;
    const uint64_t n = first + lanes.lane();
    char* row = nullptr;
    if (n < *num_new) row = rows.Row(numbers[new_keys[n]]);
    CopyRows(lanes, row == nullptr ? nullptr : row + offset, row, bytes, alignment);
  }
};

// Enters in the counters what launches before took and gave back, and tells the host. One lane.
struct CountRowsBody {
  RowCounters* counters;
  uint32_t* num_new;  // how many rows were taken
  uint64_t* report;   // in host memory: sequence << 32 | rows
  uint32_t sequence;
  uint64_t* removed;  // how many were given back; may be null
  uint64_t* expired;  // the same is added to it; may be null

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0) return;
    const uint32_t reused = counters->fresh < counters->free ? counters->fresh : counters->free;
    counters->free += counters->freed - reused;
    counters->high_water += counters->fresh - reused;
    *num_new = counters->fresh;
    if (removed != nullptr) *removed = counters->freed;
    if (expired != nullptr) *expired += counters->freed;
    counters->fresh = 0;
    counters->freed = 0;
    const uint64_t rows = counters->high_water - counters->free;
#if defined(__CUDA_ARCH__)
    *reinterpret_cast<volatile uint64_t*>(report) = static_cast<uint64_t>(sequence) << 32 | rows;
#else
    StoreRelease(report, static_cast<uint64_t>(sequence) << 32 | rows);
#endif
  }
};

// Puts the keys of an index into a larger one. Lane l has bucket first + l.
struct RebuildBody {
  DeviceIndex from;
  DeviceIndex to;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = first + lanes.lane();
    if (b >= from.num_buckets) return;
    const DeviceBucket& bucket = from.buckets[b];
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      if ((bucket.meta >> s & 1) != 0) to.InsertNew(bucket.keys[s], bucket.rows[s]);
    }
  }
};

}  // namespace kvtable
