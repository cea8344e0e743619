// Kernel bodies of expiry: rows that have expired go before a batch meets them; rows of a slice of the index
// that a test is true of; ranks, counted by digits. CountRowsBody (insert_kernels.h) enters the freed rows in
// the counters.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "erase_kernels.h"
#include "eviction/row_test.h"
#include "kvtable/types.h"

namespace kvtable {

struct HasExpired {
  DeviceRows rows;
  uint32_t expired_before;

  KVTABLE_HOST_DEVICE bool operator()(uint32_t row) const {
    return rows.StampOf(row)->version < expired_before;
  }
};

struct EraseExpiredBody {
  BatchKeys keys;
  DeviceIndex index;
  HasExpired has_expired;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint64_t key = i < keys.n ? keys.At(i) : 0;
    const uint32_t row = i < keys.n ? index.EraseWhere(key, has_expired) : kNoRow;
    GiveBack(lanes, has_expired.rows, row, key);
  }
};

// The sum of the squares of a row's value.
struct SquaresOfRow {
  const char* row;
  ValueType type;
  int64_t dim;

  KVTABLE_HOST_DEVICE double operator()() const {
    switch (type) {
      case ValueType::kFloat32:
        return SumOfSquares<float>(row, dim);
      case ValueType::kFloat16:
        return SumOfSquares<Float16>(row, dim);
      case ValueType::kBFloat16:
        return SumOfSquares<BFloat16>(row, dim);
      case ValueType::kFloat64:
        return SumOfSquares<double>(row, dim);
      case ValueType::kInt8:
        return SumOfSquares<int8_t>(row, dim);
      case ValueType::kInt32:
        return SumOfSquares<int32_t>(row, dim);
      case ValueType::kInt64:
        return SumOfSquares<int64_t>(row, dim);
      case ValueType::kBool:
        return SumOfSquares<uint8_t>(row, dim);
    }
    return 0;
  }
};

// The buckets of a slice, and how to read what is in them.
struct IndexSlice {
  DeviceIndex index;
  DeviceRows rows;
  uint64_t begin;
  uint64_t end;
  ValueType type;
  int64_t dim;

  // The row at a place of a bucket, or kNoRow.
  KVTABLE_HOST_DEVICE uint32_t RowAt(uint64_t bucket, int place) const {
    if (bucket >= end || (LoadRelaxed(&index.buckets[bucket].meta) >> place & 1) == 0) return kNoRow;
    return index.buckets[bucket].rows[place];
  }
  KVTABLE_HOST_DEVICE SquaresOfRow SquaresOf(uint32_t row) const { return {rows.Row(row), type, dim}; }
};

// Lane l has bucket begin + first + l.
struct EvictSliceBody {
  IndexSlice slice;
  RowTest test;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = slice.begin + first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      uint32_t freed = kNoRow;
      uint64_t key = 0;
      const uint32_t row = slice.RowAt(b, s);
      if (row != kNoRow) {
        const DeviceStamp stamp = *slice.rows.StampOf(row);
        key = slice.index.buckets[b].keys[s];
        const bool goes = Goes(test, key, stamp.frequency, stamp.version, slice.SquaresOf(row));
        if (goes && slice.index.EraseAt(b, s)) freed = row;
      }
      GiveBack(lanes, slice.rows, freed, key);
    }
  }
};

// Lane l has bucket begin + first + l.
struct CountRanksBody {
  IndexSlice slice;
  RankDigit digit;
  uint32_t* counts;  // (RankDigit::kValues)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t b = slice.begin + first + lanes.lane();
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      int value = -1;
      const uint32_t row = slice.RowAt(b, s);
      if (row != kNoRow) {
        const DeviceStamp stamp = *slice.rows.StampOf(row);
        value = DigitOf(digit, RankOf(digit.by, slice.index.buckets[b].keys[s], stamp.frequency,
                                      stamp.version, slice.SquaresOf(row)));
      }
      lanes.CountEach(value >= 0, static_cast<uint32_t>(value), counts);
    }
  }
};

}  // namespace kvtable
