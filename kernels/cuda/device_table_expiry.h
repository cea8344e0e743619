// The table in device memory: rows that go by age, norm, frequency or rank.
#pragma once

#include "device_table_impl.h"
#include "expiry_kernels.h"

namespace kvtable {

// No launch that reads or writes rows looks at ages: what a batch must not see has gone before it.
template <class Device>
BatchTime DeviceTableImpl<Device>::DropExpired(const DeviceKeys& keys) {
  const BatchTime time = ages_.Begin();
  if (time.expired_before == 0 || keys.n <= 0) return time;
  EnsureRoomToFree(keys.n);
  device_.Launch(Count(keys.n), EraseExpiredBody{Batch(keys), index_, {rows_, time.expired_before}});
  CountRows(0, nullptr, true);
  return time;
}

template <class Device>
void DeviceTableImpl<Device>::EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                                         uint64_t* removed, DeviceStream stream) {
  const Operation operation(this, stream, Does::kWrite);
  EnsureRoomToFree(most_rows == kAllRows ? row_capacity_
                                         : std::min(row_capacity_, most_rows + DeviceBucket::kKeys));
  const IndexSlice slice = NextSlice(cursor, most_rows);
  device_.Launch(slice.end - slice.begin, EvictSliceBody{slice, test});
  CountRows(0, removed, true);
}

template <class Device>
void DeviceTableImpl<Device>::CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows,
                                         uint32_t* counts, DeviceStream stream) {
  const Operation operation(this, stream);
  const IndexSlice slice = NextSlice(cursor, most_rows);
  device_.Launch(slice.end - slice.begin, CountRanksBody{slice, digit, counts});
}

// A cursor is the number of a bucket. When the index has grown since, that is one that was seen already.
template <class Device>
IndexSlice DeviceTableImpl<Device>::NextSlice(PassCursor* cursor, int64_t most_rows) const {
  const uint64_t begin = std::min(cursor->next, index_.num_buckets);
  const uint64_t most = most_rows == kAllRows ? index_.num_buckets : Count(most_rows) / DeviceBucket::kKeys;
  const uint64_t end = std::min(index_.num_buckets, begin + std::max<uint64_t>(1, most));
  *cursor = {end, end == index_.num_buckets};
  return {index_, rows_, begin, end, options_.value_type, options_.dim};
}

}  // namespace kvtable
