// The table in device memory: rows that change places between device memory and host memory.
#pragma once

#include "device_table_impl.h"
#include "hot_rows_kernels.h"

namespace kvtable {

template <class Device>
void DeviceTableImpl<Device>::MoveHotRows(int64_t most, DeviceStream stream) {
  if (most < 0) {
    throw Error(ErrorCode::kInvalidArgument, "Table '" + options_.name + "' was to move " +
                                                 std::to_string(most) + " rows; expected 0 or more.");
  }
  const Operation operation(this, stream);
  most = std::min(most, DeviceRowCount());
  if (most == 0 || !HasHostRows()) return;
  PrepareToMove(most);
  MoveHotRowsOf(0, index_.num_buckets, most);
}

template <class Device>
void DeviceTableImpl<Device>::PrepareToMove(int64_t most) {
  if (most <= most_moving_) return;
  moving_ =
      Allocate(sizeof(HotRows) + 2 * Count(most) * sizeof(Slot), MemoryPlace::kDevice, "scratch memory");
  most_moving_ = most;
}

template <class Device>
void DeviceTableImpl<Device>::MoveHotRowsInTurn() {
  if (options_.move_hot_rows <= 0 || !HasHostRows() || ++batches_ % kBatchesPerTurn != 0) return;
  const int64_t most = std::min(options_.move_hot_rows, DeviceRowCount());
  if (most == 0) return;
  const uint64_t buckets =
      std::min(index_.num_buckets, Count(most) * kLooksPerMove / DeviceBucket::kKeys + 1);
  if (hand_ >= index_.num_buckets) hand_ = 0;
  MoveHotRowsOf(hand_, buckets, most);
  hand_ += buckets;
}

template <class Device>
void DeviceTableImpl<Device>::MoveHotRowsOf(uint64_t begin, uint64_t buckets, int64_t most_rows) {
  HotRows* const state = moving_.template as<HotRows>();
  Slot* const hot = reinterpret_cast<Slot*>(state + 1);
  Slot* const cold = hot + most_rows;
  const IndexWindow window{index_, begin, buckets};
  const uint32_t most = static_cast<uint32_t>(most_rows);
  const uint32_t device_rows = static_cast<uint32_t>(DeviceRowCount());
  device_.Fill(state, 0, sizeof(HotRows));
  device_.Launch(buckets, CountPlacesBody{window, rows_, device_rows, state});
  device_.Launch(1, BeginRanksBody{most, state});
  for (int digit = 0; digit < StampRank::kDigits; ++digit) {
    device_.Launch(buckets, CountStampDigitBody{window, rows_, device_rows, digit, state});
    device_.Launch(1, PickStampDigitBody{digit, state});
  }
  for (const bool on_bounds : {false, true}) {
    device_.Launch(buckets, ListMovingBody{window, rows_, device_rows, on_bounds, most, state, hot, cold});
  }
  device_.Launch(Count(most_rows), SwapRowsBody{index_, rows_, Marks(), evictor_.ranked(), most, state, hot,
                                                cold, AlignmentOf(Count(layout_.row_bytes))});
}

}  // namespace kvtable
