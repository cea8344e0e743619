// The table in device memory: training steps.
#pragma once

#include "device_table_impl.h"
#include "gradient_kernels.h"
#include "table/check_batch.h"
#include "update_rows.h"

namespace kvtable {

template <class Device>
void DeviceTableImpl<Device>::Apply(const DeviceKeys& keys, const void* gradients, const Update& update,
                                    const SlotColumns& slots, Stamp stamp, DeviceStream stream) {
  CheckBatch(keys.n);
  CheckUpdate(update);
  const OptimizerSpec& optimizer = *update.optimizer;
  if (slots.columns.size() != optimizer.slots.size()) {
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + optimizer.name + " keeps " +
                                                 std::to_string(optimizer.slots.size()) +
                                                 " slots; got columns for " +
                                                 std::to_string(slots.columns.size()) + ".");
  }
  const BatchOperation operation(this, keys, stream);
  stamp.ends_step = true;
  const Stamp written = operation.StampOf(stamp);
  RowsToUpdate rows;
  for (size_t s = 0; s < slots.columns.size(); ++s) {
    rows.offsets[s + 1] = layout_.At(slots.columns[s], options_.dim, slots.generation).offset;
  }
  const WorkingMemory working =
      WorkingMemoryFor<Device>(optimizer, options_.value_type, options_.dim, keys.n);
  if (keys.n == 0) {
    ages_.End(stamp);
    return TouchAndEvict(keys, false, nullptr, nullptr);
  }
  // All that may fail for want of memory, before anything changes.
  PrepareScratch(keys.n);
  if (!stamp.existing_only) EnsureRoom(keys);
  if (!keys.distinct) {
    PrepareSort();
    PrepareChunkSums(keys.n);
  }
  if (Count(working.bytes) > working_.bytes()) {
    working_ = Allocate(Count(working.bytes), MemoryPlace::kDevice, "working memory");
  }
  if (optimizer.zeroes_rows) PrepareMarks();
  if (update.skip_nonfinite) EnsureRoomToFree(keys.n);

  Insert(keys, FirstValue::kInitial, flags(), MayInsert(stamp));
  NoteWrites(keys.n);
  CopyValueToSlots(keys.n);
  rows.batch = SortedByRow(keys, gradients);
  SumChunks(&rows.batch);
  rows.keys = Batch(keys);
  rows.rows = rows_;
  if (update.skip_nonfinite) {
    bool* const skipped = reinterpret_cast<bool*>(new_keys());
    VisitValueType(options_.value_type, [&](auto t) {
      device_.Launch(
          Count(keys.n) * kLanesOfRow,
          CheckGradientsBody<decltype(t)>{rows.batch, skipped, &words_.template as<Words>()->skipped});
    });
    device_.Launch(Count(keys.n), EraseSkippedBody{Batch(keys), rows.batch, skipped, flags(), index_, rows_});
    CountRows(0);
    rows.skipped = skipped;
  }
  rows.decay = update.hyperparameters[0] * update.hyperparameters[1];
  rows.stochastic_rounding = update.stochastic_rounding;
  rows.seed = update.seed;
  rows.zero_marks = Marks();
  rows.stamp = written;
  WorkingMemory given = working;
  given.memory = working_.data();
  UpdateRows(&device_, rows, update, options_.value_type, given);
  ages_.End(stamp);
  if (!evictor_.is_bounded()) return;
  if (update.skip_nonfinite) Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);  // some have gone
  TouchAndEvict(keys, false, nullptr, nullptr);
}

template <class Device>
int64_t DeviceTableImpl<Device>::SkippedUpdates() const {
  const Operation operation(this, nullptr);
  uint64_t skipped = 0;
  device_.Copy(&skipped, &words_.template as<Words>()->skipped, sizeof(skipped));
  device_.WaitInside();
  return static_cast<int64_t>(skipped);
}

template <class Device>
BatchGradients DeviceTableImpl<Device>::SortedByRow(const DeviceKeys& keys, const void* gradients) {
  BatchGradients batch;
  batch.row_of = numbers();
  batch.n = Count(keys.n);
  batch.gradients = gradients;
  batch.dim = options_.dim;
  if (keys.distinct) return batch;
  uint32_t* const rows = reinterpret_cast<uint32_t*>(new_slots());
  uint32_t* const places = rows + scratch_keys_;
  int bits = 1;
  while (bits < 32 && row_capacity_ >> bits != 0) ++bits;
  device_.Launch(batch.n, PlacesBody{new_keys(), batch.n});
  device_.SortPairs(sort_scratch_.data(), sort_scratch_.bytes(), numbers(), rows, new_keys(), places, batch.n,
                    bits);
  batch.row_of = rows;
  batch.place_of = places;
  return batch;
}

// Near the square root of a batch, so that of neither chunks nor positions in one a hot row has very many; none in
// small batches.
template <class Device>
int DeviceTableImpl<Device>::ChunkBitsFor(int64_t n) {
  constexpr int64_t kLeast = 512;
  if (kLanesOfRow == 1 || n < kLeast) return 0;
  int bits = 0;
  while (n >> bits != 0) ++bits;
  return std::max(5, bits / 2 - 2);
}

template <class Device>
void DeviceTableImpl<Device>::PrepareChunkSums(int64_t n) {
  const int bits = ChunkBitsFor(n);
  if (bits == 0) return;
  const size_t bytes = Count((n >> bits) * options_.dim) * sizeof(double);
  if (bytes > chunk_sums_.bytes()) chunk_sums_ = Allocate(bytes, MemoryPlace::kDevice, "sums of gradients");
}

template <class Device>
void DeviceTableImpl<Device>::SumChunks(BatchGradients* batch) {
  const int bits = batch->place_of == nullptr ? 0 : ChunkBitsFor(static_cast<int64_t>(batch->n));
  if (bits == 0) return;
  batch->chunk_bits = bits;
  VisitValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    using C = typename Element<T>::Compute;
    device_.Launch(batch->chunks() * kLanesOfRow, SumChunksBody<T>{*batch, chunk_sums_.template as<C>()});
  });
  batch->chunk_sums = chunk_sums_.data();
}

}  // namespace kvtable
