// The table in device memory: lookups that change nothing.
#pragma once

#include "device_table_impl.h"
#include "find_kernels.h"
#include "hot_rows_kernels.h"
#include "score_kernels.h"
#include "table/check_batch.h"
#include "zero_mark_kernels.h"

namespace kvtable {

template <class Device>
void DeviceTableImpl<Device>::Gather(const DeviceKeys& keys, void* out, Missing missing, const void* defaults,
                                     int64_t num_defaults, bool* found, DeviceStream stream) {
  CheckBatch(keys.n);
  if (missing == Missing::kDefault && keys.n > 0 && (defaults == nullptr || num_defaults <= 0)) {
    throw Error(ErrorCode::kInvalidArgument, "Gather with Missing::kDefault got " +
                                                 std::to_string(num_defaults) +
                                                 " default rows; expected at least one.");
  }
  const BatchOperation operation(this, keys, stream, Does::kRead);
  GatherColumn(keys, nullptr, 0, value_bytes_, out,
               {missing, initial_, static_cast<const char*>(defaults), static_cast<uint64_t>(num_defaults)},
               found);
}

template <class Device>
void DeviceTableImpl<Device>::GatherColumns(const DeviceKeys& keys, const std::vector<ColumnOut>& out,
                                            bool* found, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  for (const ColumnOut& column : out) CheckColumn(column);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, found, nullptr, nullptr);
  for (const ColumnOut& column : out) {
    const RowLayout::Column& c = layout_.columns[Count(column.column)];
    const bool is_value = column.column == 0 || layout_.slots[static_cast<size_t>(column.column) - 1].init ==
                                                    SlotSpec::Init::kCopyValue;
    MissingValue missing{Missing::kInitial, initial_, nullptr, 0};
    if (!is_value) missing = {Missing::kDefault, initial_, first_slots_.data() + c.offset, 1};
    GatherColumn(keys, numbers(), c.offset, c.bytes, column.data, missing, nullptr);
  }
}

template <class Device>
void DeviceTableImpl<Device>::Pointers(const DeviceKeys& keys, void** out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  Locate(keys, nullptr, out, nullptr, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::Contains(const DeviceKeys& keys, bool* out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  Locate(keys, nullptr, nullptr, out, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::Positions(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  device_.Launch(Count(keys.n), PositionsBody{Batch(keys), index_, out});
}

template <class Device>
void DeviceTableImpl<Device>::GatherStamps(const DeviceKeys& keys, uint32_t* freqs, uint32_t* versions,
                                           DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  Locate(keys, nullptr, nullptr, nullptr, freqs, versions);
}

template <class Device>
void DeviceTableImpl<Device>::Zeroed(const DeviceKeys& keys, bool* out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  device_.Launch(Count(keys.n), ZeroedBody{Marks(), numbers(), Count(keys.n), out});
}

template <class Device>
int64_t DeviceTableImpl<Device>::ZeroedRows() {
  const Operation operation(this, nullptr);
  uint32_t* const count = &words_.template as<Words>()->count;
  device_.Fill(count, 0, sizeof(uint32_t));
  device_.Launch(index_.num_buckets, CountZeroedBody{Marks(), index_, count});
  return ReadCount();
}

template <class Device>
void DeviceTableImpl<Device>::Scores(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  if (rows_.ranks.ranks == nullptr) return device_.Fill(out, 0, Count(keys.n) * sizeof(uint64_t));
  device_.Launch(Count(keys.n), ScoresBody{Batch(keys), index_, rows_.ranks, out});
}

template <class Device>
void DeviceTableImpl<Device>::InDeviceMemory(const DeviceKeys& keys, bool* out, DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  device_.Launch(Count(keys.n),
                 InDeviceBody{numbers(), Count(keys.n), static_cast<uint32_t>(DeviceRowCount()), out});
}

template <class Device>
void DeviceTableImpl<Device>::Locate(const DeviceKeys& keys, uint32_t* out, void** pointers, bool* found,
                                     uint32_t* freqs, uint32_t* versions) {
  device_.Launch(Count(keys.n),
                 LocateBody{Batch(keys), index_, rows_, out, pointers, found, freqs, versions});
}

template <class Device>
void DeviceTableImpl<Device>::GatherColumn(const DeviceKeys& keys, const uint32_t* located, int64_t offset,
                                           int64_t bytes, void* out, const MissingValue& missing,
                                           bool* found) {
  const int alignment = Alignment(Count(offset | bytes), out, missing.defaults);
  device_.Launch(Count(keys.n), GatherBody{Batch(keys), index_, rows_, located, missing, offset, bytes,
                                           alignment, static_cast<char*>(out), found});
}

template <class Device>
void DeviceTableImpl<Device>::CopyOut(const uint32_t* rows, int64_t n, const uint32_t* limit, int64_t offset,
                                      int64_t bytes, void* out) {
  device_.Launch(Count(n), GatherRowsBody{rows_, rows, Count(n), limit, offset, bytes,
                                          Alignment(Count(offset | bytes), out), static_cast<char*>(out)});
}

}  // namespace kvtable
