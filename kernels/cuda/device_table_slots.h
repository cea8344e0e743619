// The table in device memory: another row layout, in place.
#pragma once

#include "device_table_impl.h"
#include "relayout_kernels.h"

namespace kvtable {

template <class Device>
uint64_t DeviceTableImpl<Device>::EnsureSlots(const std::vector<SlotSpec>& slots, DeviceStream stream) {
  const Operation operation(this, stream, Does::kWrite);
  RowLayout to(options_.value_type, options_.dim, slots, layout_.generation + 1, &layout_);
  if (to.slots != layout_.slots) {
    ChangeLayout(std::move(to));
    ForgetAllChanges(ChangeLog::Why::kSlots);
  }
  return layout_.generation;
}

template <class Device>
void DeviceTableImpl<Device>::SetInitializer(const Initializer& initializer, DeviceStream stream) {
  const Operation operation(this, stream);
  Block rows;  // what is queued reads the old ones, which are freed behind it
  initial_ = UploadInitialValue(initializer, &rows);
  initial_rows_ = std::move(rows);
  options_.initializer = initializer;
}

template <class Device>
void DeviceTableImpl<Device>::ChangeLayout(RowLayout to) {
  const int64_t slab_bytes = to.row_bytes << rows_.slab_bits;
  const bool widens = to.row_bytes > layout_.row_bytes;
  const int64_t slabs = static_cast<int64_t>(slabs_.size());
  // Wider rows may have to leave device memory; others go where there is room.
  const int64_t in_device = widens ? std::min(device_slabs_, DeviceSlabsFor(slab_bytes))
                                   : std::min(slabs, PlacesIn(device_rows_, slab_bytes));
  RowCounters counters;
  device_.Copy(&counters, rows_.counters, sizeof(counters));
  device_.WaitInside();
  const int64_t rows = counters.high_water;
  const int64_t group = std::min(rows, std::max(int64_t{64}, kStageBytes / layout_.row_bytes));

  Block first_slots = UploadFirstSlots(to);
  RowRoom room = MakeRowRoom(in_device, slabs - in_device, slab_bytes);
  Block table;
  if (slabs > 0) table = Allocate(slab_table_.bytes(), MemoryPlace::kDevice, "its slabs");
  Block stage;
  if (rows > 0) {
    stage = Allocate(Count(group * layout_.row_bytes), MemoryPlace::kDevice, "rows that change their slots");
  }

  if (slabs > in_device) PrepareToMoveInTurn(in_device);

  const DeviceRows before = rows_;
  const RowLayout from = std::exchange(layout_, std::move(to));
  first_slots_ = std::move(first_slots);
  TakeRowRoom(std::move(room));
  device_slabs_ = in_device;
  PlaceSlabs(slab_bytes);
  rows_.row_bytes = layout_.row_bytes;
  options_.slots = layout_.slots;
  if (slabs > 0) {
    device_.Copy(table.data(), slabs_.data(), slabs_.size() * sizeof(DeviceSlab));
    rows_.slabs = table.template as<DeviceSlab>();
  }
  const int64_t groups = rows == 0 ? 0 : (rows + group - 1) / group;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = (widens ? groups - 1 - g : g) * group;
    const uint64_t n = Count(std::min(group, rows - first));
    device_.Launch(n,
                   StageRowsBody{before, Count(first), n, AlignmentOf(Count(from.row_bytes)), stage.data()});
    MoveColumns(from, Count(first), n, stage.data());
  }
  device_.WaitInside();  // pinned memory is freed at once
  device_rows_.KeepFirst(device_slabs_, slab_bytes);
  host_rows_.KeepFirst(slabs - device_slabs_, slab_bytes);
  if (slabs > 0) slab_table_ = std::move(table);
}

template <class Device>
void DeviceTableImpl<Device>::MoveColumns(const RowLayout& from, uint64_t first, uint64_t n,
                                          const char* stage) {
  for (size_t c = 0; c < layout_.columns.size(); ++c) {
    const RowLayout::Column& column = layout_.columns[c];
    const char* source = stage;  // the value
    int64_t stride = from.row_bytes;
    if (c > 0) {
      const SlotSpec& slot = layout_.slots[c - 1];
      const auto same = std::find_if(from.slots.begin(), from.slots.end(), [&](const SlotSpec& s) {
        return s.name == slot.name && s.width == slot.width;
      });
      if (same != from.slots.end()) {
        source += from.columns[static_cast<size_t>(same - from.slots.begin()) + 1].offset;
      } else if (slot.init != SlotSpec::Init::kCopyValue) {
        source = first_slots_.data() + column.offset;
        stride = 0;
      }
    }
    device_.Launch(
        n, MoveColumnBody{rows_, first, n, column.offset, column.bytes,
                          Alignment(Count(column.offset | column.bytes | stride), source), source, stride});
  }
}

}  // namespace kvtable
