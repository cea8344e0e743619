// The table in device memory: rows that go: removed, shrunk away, evicted.
#pragma once

#include "device_table_impl.h"
#include "erase_kernels.h"
#include "shrink_kernels.h"
#include "table/check_batch.h"

namespace kvtable {

template <class Device>
int64_t DeviceTableImpl<Device>::EvictedCount() const {
  const Operation operation(this, nullptr);
  if (evictor_.evicted() == nullptr) return 0;
  uint64_t evicted = 0;
  device_.Copy(&evicted, evictor_.evicted(), sizeof(evicted));
  device_.WaitInside();
  return static_cast<int64_t>(evicted);
}

template <class Device>
int64_t DeviceTableImpl<Device>::ExpiredCount() const {
  const Operation operation(this, nullptr);
  uint64_t expired = 0;
  device_.Copy(&expired, &words_.template as<Words>()->expired, sizeof(expired));
  device_.WaitInside();
  return static_cast<int64_t>(expired);
}

template <class Device>
void DeviceTableImpl<Device>::SetScores(const DeviceKeys& keys, const uint64_t* scores, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream);
  evictor_.RequireCustom();
  PrepareScratch(keys.n);
  PrepareClaims(keys.n);
  if (rows_.ranks.ranks == nullptr) return;  // no row was ever inserted
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  NoteWrites(keys.n);
  evictor_.SetScores(&device_, Claim(keys, false), numbers(), Count(keys.n), scores);
}

template <class Device>
void DeviceTableImpl<Device>::Remove(const DeviceKeys& keys, uint64_t* removed, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream);
  EnsureRoomToFree(keys.n);
  device_.Launch(Count(keys.n), EraseBody{Batch(keys), index_, rows_});
  CountRows(0, removed);
}

template <class Device>
void DeviceTableImpl<Device>::RemoveIf(const RowPredicate& predicate, uint64_t* removed,
                                       DeviceStream stream) {
  const Operation operation(this, stream, Does::kWrite);
  EnsureRoomToFree(row_capacity_);
  device_.Launch(index_.num_buckets, EraseIfBody{index_, rows_, predicate});
  CountRows(0, removed);
}

template <class Device>
void DeviceTableImpl<Device>::Shrink(int64_t rows, ShrinkOrder order, DeviceStream stream) {
  if (rows < 0) {
    throw Error(ErrorCode::kInvalidArgument, "Table '" + options_.name + "' was to shrink to " +
                                                 std::to_string(rows) + " rows; expected 0 or more.");
  }
  const Operation operation(this, stream, Does::kWrite);
  if (RowsAtMost() <= rows) return;
  EnsureRoomToFree(row_capacity_);
  if (selection_.data() == nullptr) {
    selection_ = Allocate(sizeof(Selection), MemoryPlace::kDevice, "scratch memory");
  }
  Selection* const selection = selection_.template as<Selection>();
  device_.Launch(1, BeginSelectionBody{rows_.counters, Count(rows), selection});
  for (int digit = 0; digit < Selection::kDigits; ++digit) {
    device_.Launch(index_.num_buckets, CountDigitBody{index_, rows_, order, digit, selection});
    device_.Launch(1, PickDigitBody{digit, selection});
  }
  device_.Launch(index_.num_buckets, EraseSelectedBody{index_, rows_, order, selection});
  CountRows(0);
}

template <class Device>
void DeviceTableImpl<Device>::Clear(DeviceStream stream) {
  const Operation operation(this, stream, Does::kWrite);
  device_.Fill(buckets_.data(), 0, buckets_.bytes());
  device_.Fill(rows_.counters, 0, sizeof(RowCounters));
  evictor_.Clear(&device_);
  CountRows(0);
  free_at_most_ = 0;
  ForgetAllChanges(ChangeLog::Why::kCleared);
}

template <class Device>
void DeviceTableImpl<Device>::PrepareEviction(int64_t n) {
  if (!evictor_.is_bounded()) return;
  PrepareClaims(n);
  PrepareSort();
  EnsureRoomToFree(row_capacity_);
  evictor_.Prepare(&device_, row_capacity_, n,
                   [this](size_t bytes) { return Allocate(bytes, MemoryPlace::kDevice, "its scores"); });
  rows_.ranks = evictor_.ranks();
  may_exceed_ = RowsAtMost() + n > evictor_.max_capacity();
}

template <class Device>
void DeviceTableImpl<Device>::TouchAndEvict(const DeviceKeys& keys, bool counted, const uint64_t* scores,
                                            const DeviceEvicted* evicted) {
  if (evictor_.is_bounded()) {
    if (keys.n == 0) PrepareEviction(0);
    NoteWrites(keys.n);  // of their scores
    evictor_.AdvanceClock(&device_);
    evictor_.Touch(&device_, Claim(keys, options_.eviction == Eviction::kCustom), numbers(), Count(keys.n),
                   counted, may_exceed_);
    if (scores != nullptr) {
      evictor_.SetScores(&device_, Claim(keys, false), numbers(), Count(keys.n), scores);
    }
  }
  Evict(keys, false, evicted);
}

template <class Device>
void DeviceTableImpl<Device>::Evict(const DeviceKeys& keys, bool imported, const DeviceEvicted* evicted) {
  uint64_t* const count = evicted == nullptr ? nullptr : evicted->count;
  if (!evictor_.is_bounded() || !may_exceed_) {
    if (count != nullptr) device_.Fill(count, 0, sizeof(uint64_t));
    return;
  }
  const uint64_t n = Count(keys.n);
  const auto sort = [this](auto... arguments) {
    device_.SortPairs(sort_scratch_.data(), sort_scratch_.bytes(), arguments...);
  };
  evictor_.FindVictims(&device_, rows_.counters, n, imported, count);
  if (!imported && keys.n > evictor_.max_capacity()) {
    evictor_.FindEarliest(&device_, Claim(keys, false), numbers(), n, sort);
  }
  if (evicted != nullptr && evicted->WantsRows()) {
    const uint32_t* limit = nullptr;
    const uint32_t* const victims = evictor_.OrderVictims(&device_, rows_.counters, n, sort, &limit);
    const int64_t most = std::min(keys.n, evicted->capacity);
    evictor_.CopyVictims(&device_, victims, Count(most), narrow_, *evicted);
    if (evicted->values != nullptr) CopyOut(victims, most, limit, 0, value_bytes_, evicted->values);
  }
  evictor_.EraseVictims(&device_, index_, rows_, n);
  if (!imported) evictor_.UnmarkOwn(&device_, numbers(), n);
  CountRows(0);
}

}  // namespace kvtable
