// The table in device memory: memory and room: who has what, and how it grows.
#pragma once

#include "device_table_impl.h"
#include "insert_kernels.h"
#include "values/initial_value.h"

namespace kvtable {

template <class Device>
DeviceMemoryUse DeviceTableImpl<Device>::Memory() const {
  std::lock_guard<std::mutex> hold(mutex_);
  device_.Wait();
  DeviceMemoryUse use;
  use.rows = RowsAtMost();
  use.row_bytes = use.rows * layout_.row_bytes;
  use.index_bytes = static_cast<int64_t>(buckets_.bytes());
  use.column_bytes = static_cast<int64_t>(free_rows_.bytes());
  use.column_bytes += static_cast<int64_t>(marks_.bytes()) + evictor_.column_bytes() + changes_.bytes();
  for (const Block& block : stamp_blocks_) use.column_bytes += static_cast<int64_t>(block.bytes());
  use.host_bytes = host_rows_.bytes();
  use.slack_bytes = device_rows_.bytes() + use.host_bytes - use.row_bytes;
  use.scratch_bytes = static_cast<int64_t>(scratch_.bytes() + claims_.bytes() + sort_scratch_.bytes() +
                                           chunk_sums_.bytes() + working_.bytes() + moving_.bytes()) +
                      evictor_.scratch_bytes();
  return use;
}

template <class Device>
void DeviceTableImpl<Device>::Reserve(int64_t rows, int64_t batch, DeviceStream stream) {
  if (rows < 0 || batch < 0) {
    throw Error(ErrorCode::kInvalidArgument, "Reserve of " + std::to_string(rows) + " rows, for batches of " +
                                                 std::to_string(batch) + "; expected 0 or more.");
  }
  CheckBatch(batch);
  const Operation operation(this, stream);
  PrepareScratch(batch);
  PrepareClaims(batch);
  PrepareSort();
  if (evictor_.is_bounded()) rows = std::min(rows, evictor_.max_capacity());
  GrowIndex(BucketsFor(rows + batch));
  AddRows(rows + batch);
  PrepareEviction(batch);
}

template <class Device>
void DeviceTableImpl<Device>::ThrowNoMemory(size_t bytes, const char* what) const {
  throw Error(
      ErrorCode::kResourceExhausted,
      "Table '" + options_.name + "' could not get " + std::to_string(bytes) + " bytes for " + what + ": " +
          device_.MemoryLeft() +
          ". It is as it was. Give its rows less device memory (max_hbm), remove rows, or partition it.");
}

template <class Device>
DeviceInitialValue DeviceTableImpl<Device>::UploadInitialValue(const Initializer& from, Block* ready) {
  const InitialValue made(from, options_.value_type, options_.dim);
  DeviceInitialValue initial;
  initial.kind = from.kind;
  initial.value_type = options_.value_type;
  initial.dim = options_.dim;
  initial.value_bytes = value_bytes_;
  initial.a = from.a;
  initial.b = from.b;
  const float a = static_cast<float>(from.a);
  initial.below32 = std::max(a, std::nextafter(static_cast<float>(from.b), a));
  initial.below64 = std::max(from.a, std::nextafter(from.b, from.a));
  initial.seed = from.seed;
  initial.has_padding = options_.padding_key.has_value();
  initial.padding_key = options_.padding_key.value_or(0);
  std::vector<char> rows;
  if (from.kind == Initializer::Kind::kConstant) {
    rows.resize(static_cast<size_t>(value_bytes_));
    made.Fill(0, rows.data());
  } else if (from.kind == Initializer::Kind::kRows) {
    rows = *from.rows;
    initial.num_rows = Count(from.num_rows);
  }
  if (!rows.empty()) {
    *ready = Allocate(rows.size(), MemoryPlace::kDevice, "initial values");
    device_.Copy(ready->data(), rows.data(), rows.size());
    initial.rows = ready->data();
  }
  return initial;
}

template <class Device>
auto DeviceTableImpl<Device>::UploadFirstSlots(const RowLayout& layout) -> Block {
  std::vector<char> row(static_cast<size_t>(layout.row_bytes));
  layout.InitializeSlots(row.data());
  Block block = Allocate(row.size(), MemoryPlace::kDevice, "initial values");
  device_.Copy(block.data(), row.data(), row.size());
  return block;
}

template <class Device>
void DeviceTableImpl<Device>::GrowIndex(uint64_t buckets) {
  if (buckets <= index_.num_buckets) return;
  Block block = Allocate(buckets * sizeof(DeviceBucket), MemoryPlace::kDevice, "its index");
  device_.Fill(block.data(), 0, block.bytes());
  const DeviceIndex grown{block.template as<DeviceBucket>(), buckets};
  if (index_.num_buckets > 0) device_.Launch(index_.num_buckets, RebuildBody{index_, grown});
  buckets_ = std::move(block);
  index_ = grown;
}

template <class Device>
void DeviceTableImpl<Device>::AddRows(int64_t rows) {
  if (rows > kMaxRows) {
    throw Error(ErrorCode::kResourceExhausted, "Table '" + options_.name + "' was to hold " +
                                                   std::to_string(rows) + " rows; it can hold " +
                                                   std::to_string(kMaxRows) + ". Partition it.");
  }
  if (rows <= row_capacity_) return;
  const int64_t slab_rows = int64_t{1} << rows_.slab_bits;
  const int64_t slab_bytes = slab_rows * layout_.row_bytes;
  const int64_t added = (rows - row_capacity_ + slab_rows - 1) / slab_rows;
  // The first slabs are in device memory, the others are not.
  const int64_t in_device = HasHostRows() ? 0 : std::min(added, DeviceSlabsFor(slab_bytes) - device_slabs_);
  const int64_t host_slabs = static_cast<int64_t>(slabs_.size()) - device_slabs_;
  RowRoom room = MakeRowRoom(device_slabs_ + in_device, host_slabs + added - in_device, slab_bytes);
  Block stamps = Allocate(Count(added * slab_rows) * sizeof(DeviceStamp), MemoryPlace::kDevice, "its stamps");
  const size_t slabs = slabs_.size() + Count(added);
  Block table;
  const bool moves = slabs * sizeof(DeviceSlab) > slab_table_.bytes();
  if (moves) table = Allocate(2 * slabs * sizeof(DeviceSlab), MemoryPlace::kDevice, "its slabs");

  changes_.Prepare(&device_, row_capacity_ + added * slab_rows,
                   [this](size_t bytes) { return Allocate(bytes, MemoryPlace::kDevice, "what changes"); });
  rows_.changes = changes_.view();

  if (host_slabs + added > in_device) PrepareToMoveInTurn(device_slabs_ + in_device);
  TakeRowRoom(std::move(room));
  device_slabs_ += in_device;
  for (int64_t s = 0; s < added; ++s) {
    slabs_.push_back({nullptr, stamps.template as<DeviceStamp>() + s * slab_rows});
  }
  PlaceSlabs(slab_bytes);
  if (moves) slab_table_ = std::move(table);
  device_.Copy(slab_table_.data(), slabs_.data(), slabs * sizeof(DeviceSlab));
  rows_.slabs = slab_table_.template as<DeviceSlab>();
  stamp_blocks_.push_back(std::move(stamps));
  row_capacity_ += added * slab_rows;
}

template <class Device>
auto DeviceTableImpl<Device>::MakeRowRoom(int64_t device_slabs, int64_t host_slabs, int64_t slab_bytes)
    -> RowRoom {
  RowRoom room;
  room.in_device =
      AllocateSlabs(device_slabs - PlacesIn(device_rows_, slab_bytes), slab_bytes, MemoryPlace::kDevice);
  room.on_host =
      AllocateSlabs(host_slabs - PlacesIn(host_rows_, slab_bytes), slab_bytes, MemoryPlace::kPinnedHost);
  return room;
}

template <class Device>
auto DeviceTableImpl<Device>::AllocateSlabs(int64_t slabs, int64_t slab_bytes, MemoryPlace place)
    -> std::vector<Block> {
  const char* const what = place == MemoryPlace::kDevice ? "its rows" : "its rows, in pinned host memory";
  const int64_t of_block = std::max(int64_t{1}, kMostBlockBytes / slab_bytes);
  std::vector<Block> blocks;
  for (; slabs > 0; slabs -= of_block) {
    blocks.push_back(Allocate(Padded(std::min(slabs, of_block) * slab_bytes), place, what));
  }
  return blocks;
}

template <class Device>
void DeviceTableImpl<Device>::PlaceSlabs(int64_t slab_bytes) {
  const std::vector<char*> in_device = device_rows_.Places(slab_bytes);
  const std::vector<char*> on_host = host_rows_.Places(slab_bytes);
  const size_t device_slabs = Count(device_slabs_);
  for (size_t s = 0; s < slabs_.size(); ++s) {
    slabs_[s].rows = s < device_slabs ? in_device[s] : on_host[s - device_slabs];
  }
}

template <class Device>
int64_t DeviceTableImpl<Device>::RowsAtMost() const {
  const uint64_t report = LoadAcquire(report_.template as<uint64_t>());
  const uint32_t sequence = static_cast<uint32_t>(report >> 32);
  while (!queued_.empty() && static_cast<int32_t>(queued_.front().sequence - sequence) <= 0) {
    queued_keys_ -= queued_.front().keys;
    queued_.pop_front();
  }
  const int64_t rows = static_cast<int64_t>(static_cast<uint32_t>(report)) + queued_keys_;
  // This is asked between batches, each of which has evicted.
  return evictor_.is_bounded() ? std::min(rows, evictor_.max_capacity()) : rows;
}

template <class Device>
void DeviceTableImpl<Device>::EnsureRoom(const DeviceKeys& keys) {
  if (HasRoomFor(RowsAtMost() + keys.n)) return;
  device_.WaitInside();
  const int64_t rows = RowsAtMost();
  const int64_t needed = rows + keys.n;
  if (HasRoomFor(needed)) return;
  // By more than is needed, if there is memory; by what is needed; or not at all, if the keys are there
  // already.
  try {
    GrowTo(needed, true);
    return;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
  }
  try {
    GrowTo(needed, false);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    const int64_t least = rows + CountMissing(keys);
    if (!HasRoomFor(least)) GrowTo(least, false);
  }
}

template <class Device>
void DeviceTableImpl<Device>::GrowTo(int64_t rows, bool generously) {
  if (rows > row_capacity_) {
    int64_t generous = std::min(kMaxRows, row_capacity_ + row_capacity_ / kRowGrowth);
    if (evictor_.is_bounded()) generous = std::min(generous, evictor_.max_capacity() + scratch_keys_);
    AddRows(generously ? std::max(rows, generous) : rows);
  }
  if (rows > MostKeys(index_.num_buckets)) {
    const uint64_t grown = static_cast<uint64_t>(static_cast<double>(index_.num_buckets) * kIndexGrowth) + 1;
    GrowIndex(generously ? std::max(BucketsFor(rows), grown) : BucketsFor(rows));
  }
}

template <class Device>
int64_t DeviceTableImpl<Device>::CountMissing(const DeviceKeys& keys) {
  uint32_t* const count = &words_.template as<Words>()->count;
  device_.Fill(count, 0, sizeof(uint32_t));
  device_.Launch(Count(keys.n), CountMissingBody{Batch(keys), index_, count});
  return ReadCount();
}

template <class Device>
int64_t DeviceTableImpl<Device>::ReadCount() {
  uint32_t count = 0;
  device_.Copy(&count, &words_.template as<Words>()->count, sizeof(count));
  device_.WaitInside();
  return count;
}

template <class Device>
void DeviceTableImpl<Device>::EnsureRoomToFree(int64_t rows) {
  free_at_most_ = std::min(free_at_most_ + rows, row_capacity_);
  const size_t bytes = Count(free_at_most_) * sizeof(uint32_t);
  if (bytes <= free_rows_.bytes()) return;
  Block block = Allocate(bytes + bytes / 4, MemoryPlace::kDevice, "its list of free rows");
  if (free_rows_.data() != nullptr) device_.Copy(block.data(), free_rows_.data(), free_rows_.bytes());
  free_rows_ = std::move(block);
  rows_.free_rows = free_rows_.template as<uint32_t>();
}

template <class Device>
void DeviceTableImpl<Device>::PrepareScratch(int64_t n) {
  if (n <= scratch_keys_) return;
  const size_t keys = (Count(n) + Count(n) / 4 + 63) / 64 * 64;
  scratch_ = Allocate(keys * (sizeof(Slot) + 2 * sizeof(uint32_t) + sizeof(bool)), MemoryPlace::kDevice,
                      "scratch memory");
  scratch_keys_ = static_cast<int64_t>(keys);
}

template <class Device>
void DeviceTableImpl<Device>::PrepareClaims(int64_t n) {
  const size_t bytes = ClaimsFor(n) * sizeof(uint64_t);
  if (bytes > claims_.bytes()) {
    claims_ = Allocate(bytes + bytes / 4 / 8 * 8, MemoryPlace::kDevice, "scratch memory");
  }
}

template <class Device>
void DeviceTableImpl<Device>::PrepareSort() {
  if (scratch_keys_ <= sortable_keys_) return;
  sort_scratch_ =
      Allocate(device_.SortScratchBytes(Count(scratch_keys_)), MemoryPlace::kDevice, "scratch memory");
  sortable_keys_ = scratch_keys_;
}

template <class Device>
void DeviceTableImpl<Device>::PrepareMarks() {
  const size_t bytes = (Count(row_capacity_) + 31) / 32 * sizeof(uint32_t);
  if (bytes <= marks_.bytes()) return;
  Block block = Allocate((bytes + bytes / 4 + 3) / 4 * 4, MemoryPlace::kDevice, "its marks of zero rows");
  device_.Fill(block.data(), 0, block.bytes());
  if (marks_.data() != nullptr) device_.Copy(block.data(), marks_.data(), marks_.bytes());
  marks_ = std::move(block);
}

template <class Device>
void DeviceTableImpl<Device>::CountRows(int64_t keys, uint64_t* removed, bool by_policy) {
  ++sequence_;
  if (keys > 0) queued_.push_back({sequence_, keys});
  queued_keys_ += keys;
  device_.Launch(
      1, CountRowsBody{rows_.counters, &words_.template as<Words>()->num_new, report_.template as<uint64_t>(),
                       sequence_, removed, by_policy ? &words_.template as<Words>()->expired : nullptr});
}

}  // namespace kvtable
