// The table in device memory: inserts and writes: training lookups, upserts, imports.
#pragma once

#include "device_table_impl.h"
#include "insert_kernels.h"
#include "table/check_batch.h"
#include "values/elements.h"
#include "write_kernels.h"
#include "zero_mark_kernels.h"

namespace kvtable {

template <class Device>
void DeviceTableImpl<Device>::GatherOrInsert(const DeviceKeys& keys, void* out,
                                             const DeviceInsertion& insertion, DeviceStream stream) {
  if (!(insertion.admission >= 0.0 && insertion.admission <= 1.0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "Table '" + options_.name + "' got an admission probability of " +
                    std::to_string(insertion.admission) + "; expected 0.0 to 1.0.");
  }
  const BatchOperation operation(this, keys, stream);
  InsertStamped(keys, operation.StampOf(insertion.stamp), insertion.inserted,
                MayInsert(insertion.admission, insertion.admission_seed));
  GatherColumn(keys, numbers(), 0, value_bytes_, out, {insertion.below, initial_, nullptr, 0}, nullptr);
  TouchAndEvict(keys, true, nullptr, insertion.evicted);
}

template <class Device>
void DeviceTableImpl<Device>::PointersOrInsert(const DeviceKeys& keys, void** out, Stamp stamp,
                                               bool* inserted, DeviceStream stream) {
  const BatchOperation operation(this, keys, stream);
  InsertStamped(keys, operation.StampOf(stamp), inserted, MayInsert());
  device_.Launch(Count(keys.n), PointersBody{rows_, numbers(), Count(keys.n), out});
  TouchAndEvict(keys, true, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::UpsertColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in,
                                            Stamp stamp, DeviceStream stream) {
  const BatchOperation operation(this, keys, stream);
  for (const ColumnIn& column : in) CheckColumn(column);
  WriteStamped(keys, in, operation.StampOf(stamp));
  ages_.End(stamp);
  if (!stamp.is_rewrite) TouchAndEvict(keys, true, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::InsertAndEvict(const DeviceKeys& keys, const void* values,
                                             const uint64_t* scores, Stamp stamp,
                                             const DeviceEvicted& evicted, DeviceStream stream) {
  const BatchOperation operation(this, keys, stream);
  if (scores != nullptr) evictor_.RequireCustom();
  WriteStamped(keys, {{0, values, options_.dim}}, operation.StampOf(stamp));
  TouchAndEvict(keys, true, scores, &evicted);
}

template <class Device>
void DeviceTableImpl<Device>::Accumulate(const DeviceKeys& keys, const void* deltas, bool from_zeros,
                                         Stamp stamp, DeviceStream stream) {
  const BatchOperation operation(this, keys, stream);
  Insert(keys, from_zeros ? FirstValue::kZeros : FirstValue::kInitial, nullptr, MayInsert(stamp));
  NoteWrites(keys.n);
  CopyValueToSlots(keys.n);
  VisitAnyValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    device_.Launch(Count(keys.n), AccumulateBody<T>{rows_, numbers(), Count(keys.n), options_.dim,
                                                    static_cast<const T*>(deltas)});
  });
  Unmark(keys.n, nullptr);
  StampRows(keys.n, nullptr, operation.StampOf(stamp));
  TouchAndEvict(keys, true, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::Combine(const DeviceKeys& keys, const void* operands, RowOp op, Stamp stamp,
                                      DeviceStream stream) {
  RequireFloating();
  const BatchOperation operation(this, keys, stream);
  Insert(keys, FirstValue::kInitial, nullptr, MayInsert(stamp));
  NoteWrites(keys.n);
  CopyValueToSlots(keys.n);
  VisitValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    device_.Launch(Count(keys.n), CombineBody<T>{rows_, numbers(), Count(keys.n), options_.dim,
                                                 static_cast<const T*>(operands), op});
  });
  Unmark(keys.n, nullptr);
  StampRows(keys.n, nullptr, operation.StampOf(stamp));
  TouchAndEvict(keys, true, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::Import(const DeviceKeys& keys, const std::vector<ColumnIn>& in,
                                     const uint32_t* freqs, const uint32_t* versions, const RanksIn& ranks,
                                     DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream);
  for (const ColumnIn& column : in) CheckColumn(column);
  PrepareScratch(keys.n);
  EnsureRoom(keys);
  PrepareMarks();
  const BatchClaims claims = WriteColumns(keys, in, MayInsert());
  const uint32_t latest = ages_.expiry().ages() ? operation.time().now : UINT32_MAX;
  const uint32_t without = ages_.expiry().ages() ? latest : 0;
  device_.Launch(Count(keys.n),
                 AssignStampsBody{rows_, claims, numbers(), freqs, versions, latest, without, Count(keys.n)});
  Unmark(keys.n, nullptr);
  for (const ColumnIn& column : in) {
    if (column.column == 0) MarkZeros(keys.n, claims, column.data);
  }
  if (!evictor_.is_bounded()) return;
  const bool by_age = options_.eviction == Eviction::kCustom && ranks.scores == nullptr;
  evictor_.Import(&device_, by_age ? Claim(keys, true) : claims, numbers(), Count(keys.n), freqs, versions,
                  ranks);
  Evict(keys, true, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::IncreaseFrequency(const DeviceKeys& keys, const uint32_t* by,
                                                DeviceStream stream) {
  CheckBatch(keys.n);
  const BatchOperation operation(this, keys, stream);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  NoteWrites(keys.n);
  device_.Launch(Count(keys.n), IncreaseFrequencyBody{rows_, numbers(), Count(keys.n), by});
}

template <class Device>
void DeviceTableImpl<Device>::Insert(const DeviceKeys& keys, FirstValue first_value, bool* inserted,
                                     const AdmissionDraw& admission) {
  CheckBatch(keys.n);
  const uint64_t n = Count(keys.n);
  PrepareScratch(keys.n);
  if (!admission.AdmitsNone()) EnsureRoom(keys);
  PrepareEviction(keys.n);
  MoveHotRowsInTurn();  // before any row is found
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  if (admission.AdmitsNone()) {
    if (inserted != nullptr) device_.Fill(inserted, 0, n * sizeof(bool));
    if (CopiesValue()) device_.Fill(&words_.template as<Words>()->num_new, 0, sizeof(uint32_t));
    return;
  }
  device_.Launch(n, InsertBody{Batch(keys), keys.distinct, admission, index_, rows_, numbers(), new_keys(),
                               new_slots(), inserted});
  device_.Launch(n, PlaceNewBody{Batch(keys), index_, rows_, new_keys(), new_slots(), initial_, first_value,
                                 first_slots_.data() + value_bytes_, Alignment(Count(value_bytes_)),
                                 Alignment(Count(value_bytes_))});
  CountRows(keys.n);
  if (!keys.distinct) device_.Launch(n, ResolveBody{Batch(keys), index_, numbers()});
}

template <class Device>
void DeviceTableImpl<Device>::CopyValueToSlots(int64_t n) {
  for (size_t s = 0; s < layout_.slots.size(); ++s) {
    if (layout_.slots[s].init != SlotSpec::Init::kCopyValue) continue;
    const int64_t offset = layout_.columns[s + 1].offset;
    device_.Launch(Count(n),
                   CopyValueBody{rows_, numbers(), new_keys(), &words_.template as<Words>()->num_new, offset,
                                 value_bytes_, Alignment(Count(offset | value_bytes_))});
  }
}

template <class Device>
void DeviceTableImpl<Device>::InsertStamped(const DeviceKeys& keys, Stamp stamp, bool* inserted,
                                            const AdmissionDraw& admission) {
  PrepareScratch(keys.n);
  bool* const is_new = inserted == nullptr ? flags() : inserted;
  Insert(keys, FirstValue::kInitial, is_new, admission);
  CopyValueToSlots(keys.n);
  Unmark(keys.n, is_new);
  StampRows(keys.n, is_new, stamp);
}

template <class Device>
void DeviceTableImpl<Device>::WriteStamped(const DeviceKeys& keys, const std::vector<ColumnIn>& in,
                                           Stamp stamp) {
  WriteColumns(keys, in, MayInsert(stamp));
  Unmark(keys.n, nullptr);
  StampRows(keys.n, nullptr, stamp);
}

template <class Device>
void DeviceTableImpl<Device>::Unmark(int64_t n, const bool* only) {
  if (marks_.data() == nullptr) return;
  device_.Launch(Count(n), UnmarkBody{Marks(), numbers(), only, Count(n)});
}

template <class Device>
void DeviceTableImpl<Device>::MarkZeros(int64_t n, const BatchClaims& claims, const void* values) {
  MarkZerosBody body{Marks(),
                     claims,
                     numbers(),
                     Count(n),
                     static_cast<const uint8_t*>(values),
                     Count(value_bytes_),
                     Count(SizeOf(options_.value_type))};
  if (!IsFloating(options_.value_type)) body.highest = 0xff;
  device_.Launch(Count(n), body);
}

template <class Device>
void DeviceTableImpl<Device>::StampRows(int64_t n, const bool* only, Stamp stamp) {
  if (stamp.is_rewrite) return;
  device_.Launch(Count(n), StampBody{rows_, numbers(), only, Count(n), stamp});
}

template <class Device>
BatchClaims DeviceTableImpl<Device>::Claim(const DeviceKeys& keys, bool first) {
  BatchClaims claims;
  if (keys.distinct) return claims;
  claims = {claims_.template as<uint64_t>(), ClaimsFor(keys.n), first};
  device_.Fill(claims.claims, 0xff, claims.count * sizeof(uint64_t));
  device_.Launch(Count(keys.n), ClaimBody{claims, numbers(), Count(keys.n)});
  return claims;
}

template <class Device>
BatchClaims DeviceTableImpl<Device>::WriteColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in,
                                                  const AdmissionDraw& admission) {
  const void* value = nullptr;
  for (const ColumnIn& column : in) {
    if (column.column == 0) value = column.data;
  }
  CheckBatch(keys.n);
  PrepareScratch(keys.n);
  if (!keys.distinct) PrepareClaims(keys.n);
  Insert(keys, value != nullptr ? FirstValue::kNothing : FirstValue::kInitial, flags(), admission);
  NoteWrites(keys.n);
  if (value == nullptr) {
    CopyValueToSlots(keys.n);
  } else if (CopiesValue()) {
    // A row comes to be with the value of its key's first occurrence, so that is what slots copy.
    const BatchClaims firsts = Claim(keys, true);
    for (size_t s = 0; s < layout_.slots.size(); ++s) {
      if (layout_.slots[s].init != SlotSpec::Init::kCopyValue) continue;
      Assign(keys.n, firsts, flags(), layout_.columns[s + 1], value);
    }
  }
  const BatchClaims lasts = Claim(keys, false);
  for (const ColumnIn& column : in) {
    Assign(keys.n, lasts, nullptr, layout_.columns[static_cast<size_t>(column.column)], column.data);
  }
  return lasts;
}

template <class Device>
void DeviceTableImpl<Device>::Assign(int64_t n, const BatchClaims& claims, const bool* only,
                                     const RowLayout::Column& to, const void* in) {
  device_.Launch(Count(n),
                 AssignBody{rows_, claims, numbers(), only, Count(n), to.offset, to.bytes,
                            Alignment(Count(to.offset | to.bytes), in), static_cast<const char*>(in)});
}

}  // namespace kvtable
