// Kernel bodies that remove the lowest rows until so many are left. Rows are in an order of two words, what
// their stamps say and then their key, in which no two are equal. The last row to go is found digit by digit,
// from the highest down: a launch counts the rows with each next digit among those that share the digits
// found so far, and another picks the digit where the count comes to what has to go. So nothing is sorted,
// nothing comes to the host, and which rows go is a function of the rows alone.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "device_index.h"
#include "device_rows.h"
#include "erase_kernels.h"
#include "kvtable/device_table.h"

namespace kvtable {

struct Selection {
  static constexpr int kDigits = 16;  // of 8 bits: 8 of the stamps' word, then 8 of the key
  static constexpr int kDigitValues = 256;

  uint64_t stamps;  // the digits found so far, zeros below
  uint64_t key;
  uint32_t left;  // how many rows with these digits have to go; 0: none at all
  uint32_t counts[kDigitValues];
};

KVTABLE_HOST_DEVICE inline uint64_t StampsWord(const DeviceStamp& stamp, ShrinkOrder order) {
  return order == ShrinkOrder::kOldest ? static_cast<uint64_t>(stamp.version) << 32 | stamp.frequency
                                       : static_cast<uint64_t>(stamp.frequency) << 32 | stamp.version;
}

// One lane.
struct BeginSelectionBody {
  const RowCounters* counters;
  uint64_t rows;  // that are to be left
  Selection* selection;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0) return;
    const uint64_t there = counters->high_water - counters->free;
    selection->stamps = 0;
    selection->key = 0;
    selection->left = there > rows ? static_cast<uint32_t>(there - rows) : 0;
    for (uint32_t& count : selection->counts) count = 0;
  }
};

// Lane l has bucket first + l.
struct CountDigitBody {
  DeviceIndex index;
  DeviceRows rows;
  ShrinkOrder order;
  int digit;  // counted from the highest
  Selection* selection;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (selection->left == 0) return;
    const bool of_key = digit >= 8;
    const int shift = 56 - digit % 8 * 8;
    const uint64_t above = shift == 56 ? 0 : ~uint64_t{0} << (shift + 8);
    const uint64_t b = first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      bool counts = false;
      uint32_t value = 0;
      if (b < index.num_buckets && (index.buckets[b].meta >> s & 1) != 0) {
        const uint64_t stamps = StampsWord(*rows.StampOf(index.buckets[b].rows[s]), order);
        const uint64_t word = of_key ? index.buckets[b].keys[s] : stamps;
        const uint64_t found = of_key ? selection->key : selection->stamps;
        counts = (!of_key || stamps == selection->stamps) && (word & above) == (found & above);
        value = static_cast<uint32_t>(word >> shift & 0xff);
      }
      lanes.CountEach(counts, value, selection->counts);
    }
  }
};

// One lane.
struct PickDigitBody {
  int digit;
  Selection* selection;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0 || selection->left == 0) return;
    uint32_t value = 0;
    while (selection->counts[value] < selection->left) selection->left -= selection->counts[value++];
    const uint64_t found = static_cast<uint64_t>(value) << (56 - digit % 8 * 8);
    if (digit < 8) {
      selection->stamps |= found;
    } else {
      selection->key |= found;
    }
    for (uint32_t& count : selection->counts) count = 0;
  }
};

// Removes the row that was found, and all before it. Lane l has bucket first + l.
struct EraseSelectedBody {
  DeviceIndex index;
  DeviceRows rows;
  ShrinkOrder order;
  const Selection* selection;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (selection->left == 0) return;
    const uint64_t b = first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      uint32_t freed = kNoRow;
      uint64_t key = 0;
      if (b < index.num_buckets && (LoadRelaxed(&index.buckets[b].meta) >> s & 1) != 0) {
        const uint32_t row = index.buckets[b].rows[s];
        const uint64_t stamps = StampsWord(*rows.StampOf(row), order);
        key = index.buckets[b].keys[s];
        const bool goes =
            stamps < selection->stamps || (stamps == selection->stamps && key <= selection->key);
        if (goes && index.EraseAt(b, s)) freed = row;
      }
      GiveBack(lanes, rows, freed, key);
    }
  }
};

}  // namespace kvtable
