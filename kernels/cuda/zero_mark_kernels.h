// Which rows are zeros because an optimizer's penalty made them so, and the kernel bodies that keep account.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/host_device.h"
#include "batch_claims.h"
#include "device_index.h"

namespace kvtable {

// A bit for each row number. A view that owns nothing.
struct DeviceZeroMarks {
  uint32_t* words = nullptr;
  uint64_t rows = 0;  // that there is memory for; no row beyond is marked

  KVTABLE_HOST_DEVICE bool Has(uint32_t row) const {
    return row < rows && (LoadRelaxed(&words[row / 32]) >> (row % 32) & 1) != 0;
  }
  KVTABLE_HOST_DEVICE void Set(uint32_t row, bool zeroed) const {
    if (row >= rows) return;
    const uint32_t bit = 1u << (row % 32);
    if (zeroed) {
      FetchOr(&words[row / 32], bit);
    } else if ((LoadRelaxed(&words[row / 32]) & bit) != 0) {
      FetchAnd(&words[row / 32], ~bit);
    }
  }
};

// Ends the marks of rows that were written.
struct UnmarkBody {
  DeviceZeroMarks marks;
  const uint32_t* numbers;  // (n)
  const bool* only;         // (n) or null: the occurrences that count
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n && (only == nullptr || only[i])) marks.Set(numbers[i], false);
  }
};

// Marks the rows that an import writes as zeros, of equal keys the one that counts.
struct MarkZerosBody {
  DeviceZeroMarks marks;
  BatchClaims claims;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  const uint8_t* values;  // (n, bytes)
  uint64_t bytes;
  uint64_t element;        // bytes of one
  uint8_t highest = 0x7f;  // what counts of an element's last byte: a zero may have a sign

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || !claims.Counts(numbers[i], static_cast<uint32_t>(i))) return;
    const uint8_t* const value = values + i * bytes;
    bool zero = true;
    for (uint64_t b = 0; zero && b < bytes; ++b) {
      zero = (value[b] & (b % element + 1 == element ? highest : 0xff)) == 0;
    }
    marks.Set(numbers[i], zero);
  }
};

// Whether each row is marked; kNoRow is not.
struct ZeroedBody {
  DeviceZeroMarks marks;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  bool* out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n) out[i] = numbers[i] != kNoRow && marks.Has(numbers[i]);
  }
};

// Counts the marked rows that there are. Lane l has bucket first + l.
struct CountZeroedBody {
  DeviceZeroMarks marks;
  DeviceIndex index;
  uint32_t* count;  // 0 at first

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = first + lanes.lane();
    if (b >= index.num_buckets) return;
    const DeviceBucket& bucket = index.buckets[b];
    uint32_t marked = 0;
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      if ((bucket.meta >> s & 1) != 0 && marks.Has(bucket.rows[s])) ++marked;
    }
    if (marked != 0) FetchAdd(count, marked);
  }
};

}  // namespace kvtable
