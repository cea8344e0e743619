// Writes of whole rows and of columns, and removals.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "memory/prefetch.h"
#include "table/write_groups.h"

namespace kvtable {

template <class Prepare, class Finish>
void ShardedTable::WriteColumns(const BatchTime& time, const void* keys, int64_t n,
                                const std::vector<ColumnIn>& in, bool existing_only, ParallelFor& threads,
                                const Prepare& prepare, const Finish& finish) {
  const std::shared_ptr<const InitialValue> init = initial();
  const std::shared_lock<RwSpinlock> same_slots(slots_lock_);
  const std::shared_ptr<const RowLayout> rows = layout();
  struct Piece {
    int64_t offset;
    int64_t bytes;
    const char* from;
  };
  std::vector<Piece> values, slots;
  std::vector<bool> given(rows->columns.size());
  for (const ColumnIn& column : in) {
    const RowLayout::Column& at = rows->At(column.column, column.width, column.generation);
    (column.column == 0 ? values : slots)
        .push_back({at.offset, at.bytes, static_cast<const char*>(column.data)});
    given[static_cast<size_t>(column.column)] = true;
  }
  const bool has_value = !values.empty();
  const bool has_all_slots = std::all_of(given.begin() + 1, given.end(), [](bool one) { return one; });
  const auto write = [](const std::vector<Piece>& pieces, char* at, int64_t i) {
    for (const Piece& piece : pieces) {
      std::memcpy(at + piece.offset, piece.from + i * piece.bytes, static_cast<size_t>(piece.bytes));
    }
  };
  WriteBatch(
      time, keys, n, existing_only, threads, [&](Shard& shard) { prepare(shard, n); }, [](int64_t) {},
      [&](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
        char* const at = shard.rows.Row(row);
        if (is_new && !has_value) init->Fill(key, at);
        write(values, at, i);
        if (is_new && !has_all_slots) rows->InitializeSlots(at);  // some copy the value
        write(slots, at, i);
        finish(shard, row, i);
      });
}

bool ShardedTable::IsZero(const char* value) const {
  return VisitAnyValueType(value_type_, [&](auto t) {
    using T = decltype(t);
    const T* const elements = reinterpret_cast<const T*>(value);
    return std::all_of(elements, elements + dim_, [](T x) { return Element<T>::Load(x) == 0; });
  });
}

void ShardedTable::Upsert(const void* keys, int64_t n, const void* values, Stamp stamp,
                          ParallelFor& threads) {
  const char* const rows_in = static_cast<const char*>(values);
  const int64_t bytes = value_bytes_;
  const BatchTime time = ages_.Begin();
  stamp = ages_.StampAt(time, stamp);
  VisitRowBytes(bytes, [&](auto known) {
    constexpr int64_t kBytes = decltype(known)::value;
    WriteBatch(
        time, keys, n, stamp.existing_only, threads, [](const Shard&) {},
        [=](int64_t i) KVTABLE_ALWAYS_INLINE { PrefetchRow<kBytes>(rows_in + i * bytes, bytes); },
        [=](Shard& shard, uint32_t row, uint64_t, int64_t i, bool is_new) {
          char* const at = shard.rows.Row(row);
          CopyRow<kBytes>(at, rows_in + i * bytes, bytes);
          if (is_new) shard.layout->InitializeSlots(at);
          StampRow(shard.rows.StampOf(row), stamp);
        });
  });
}

void ShardedTable::UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                                 ParallelFor& threads) {
  const BatchTime time = ages_.Begin();
  stamp = ages_.StampAt(time, stamp);
  WriteColumns(
      time, keys, n, in, stamp.existing_only, threads, [](const Shard&, int64_t) {},
      [stamp](Shard& shard, uint32_t row, int64_t) { StampRow(shard.rows.StampOf(row), stamp); });
  ages_.End(stamp);
}

void ShardedTable::Accumulate(const void* keys, int64_t n, const void* deltas, bool from_zeros, Stamp stamp,
                              ParallelFor& threads) {
  const std::shared_ptr<const InitialValue> init = initial();
  const int64_t bytes = value_bytes_;
  const BatchTime time = ages_.Begin();
  stamp = ages_.StampAt(time, stamp);
  VisitAnyValueType(value_type_, [&](auto t) {
    using T = decltype(t);
    const T* const rows_in = static_cast<const T*>(deltas);
    const int64_t width = dim_;
    WriteBatch(
        time, keys, n, stamp.existing_only, threads, [](const Shard&) {},
        [=](int64_t i) { PrefetchRow<kAnyBytes>(reinterpret_cast<const char*>(rows_in + i * width), bytes); },
        [=, &init](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
          char* const at = shard.rows.Row(row);
          if (is_new) {
            if (from_zeros) {
              std::memset(at, 0, static_cast<size_t>(bytes));
            } else {
              init->Fill(key, at);
            }
            shard.layout->InitializeSlots(at);
          }
          T* const value = reinterpret_cast<T*>(at);
          const T* const delta = rows_in + i * width;
          for (int64_t j = 0; j < width; ++j) {
            value[j] = AddElements<T>(value[j], delta[j]);
          }
          StampRow(shard.rows.StampOf(row), stamp);
        });
  });
}

void ShardedTable::Combine(const void* keys, int64_t n, const void* operands, RowOp op, Stamp stamp,
                           ParallelFor& threads) {
  const std::shared_ptr<const InitialValue> init = initial();
  const BatchTime time = ages_.Begin();
  stamp = ages_.StampAt(time, stamp);
  VisitValueType(value_type_, [&](auto t) {
    using T = decltype(t);
    const T* const rows_in = static_cast<const T*>(operands);
    const int64_t width = dim_;
    WriteBatch(
        time, keys, n, stamp.existing_only, threads, [](const Shard&) {}, [](int64_t) {},
        [=, &init](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
          char* const at = shard.rows.Row(row);
          if (is_new) {
            init->Fill(key, at);
            shard.layout->InitializeSlots(at);
          }
          T* const value = reinterpret_cast<T*>(at);
          const T* const operand = rows_in + i * width;
          for (int64_t j = 0; j < width; ++j) value[j] = CombineElements<T>(op, value[j], operand[j]);
          StampRow(shard.rows.StampOf(row), stamp);
        });
  });
}

void ShardedTable::IncreaseFrequency(const void* keys, int64_t n, const uint32_t* by, ParallelFor& threads) {
  CheckBatch(n);
  const BatchTime time = ages_.Begin();
  AwaitOwnRoomAside();
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    ShardGroups<Key> groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads.threads());
    ForGroups(groups, threads, [&](const ShardGroup& group) {
      Shard& shard = *shards_[static_cast<size_t>(group.shard)];
      std::lock_guard<ShardLock> hold(shard.lock);
      for (int64_t i = 0; i < group.count; ++i) {
        if (i + kAhead < group.count)
          __builtin_prefetch(shard.index.Home(Mix64(group.keys[i + kAhead])).bucket());
        const uint32_t row = shard.index.Find(Mix64(group.keys[i]));
        if (row == BucketIndex::kNoRow || time.HasExpired(shard.rows.StampOf(row)->version)) continue;
        shard.BeforeStamp(row);
        uint32_t& frequency = shard.rows.StampOf(row)->frequency;
        frequency = SaturatingAdd(frequency, by[group.positions[i]]);
      }
    });
  });
}

int64_t ShardedTable::Remove(const void* keys, int64_t n, ParallelFor& threads) {
  CheckBatch(n);
  const BatchTime time = ages_.Begin();
  AwaitOwnRoomAside();
  std::atomic<int64_t> removed{0};
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    ShardGroups<Key> groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads.threads());
    ForGroups(groups, threads, [&](const ShardGroup& group) {
      Shard& shard = *shards_[static_cast<size_t>(group.shard)];
      int64_t count = 0;
      std::lock_guard<ShardLock> hold(shard.lock);
      shard.rows.PrepareFree(static_cast<size_t>(std::min<int64_t>(group.count, shard.rows.live_rows())));
      for (int64_t i = 0; i < group.count; ++i) {
        if (i + kAhead < group.count)
          PrefetchToWrite(shard.index.Home(Mix64(group.keys[i + kAhead])).bucket());
        if (i + kAhead / 2 < group.count) shard.index.PrefetchErase(Mix64(group.keys[i + kAhead / 2]));
        const uint64_t hash = Mix64(group.keys[i]);
        bool has_expired = false;
        if (time.expired_before != 0) {
          const uint32_t row = shard.index.Find(hash);
          has_expired = row != BucketIndex::kNoRow && time.HasExpired(shard.rows.StampOf(row)->version);
        }
        count += shard.Remove(hash) && !has_expired ? 1 : 0;
      }
      removed.fetch_add(count, std::memory_order_relaxed);
    });
  });
  return removed.load();
}

void ShardedTable::Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
                          const uint32_t* versions, const RanksIn&, ParallelFor& threads) {
  const char* values = nullptr;
  for (const ColumnIn& column : in) {
    if (column.column == 0) values = static_cast<const char*>(column.data);
  }
  const BatchTime time = ages_.Begin();
  WriteColumns(
      time, keys, n, in, false, threads,
      [](Shard& shard, int64_t count) {
        shard.zeroed.Prepare(size_t{shard.rows.high_water()} + static_cast<size_t>(count));
      },
      [=](Shard& shard, uint32_t row, int64_t i) {
        RowStamp& stamp = *shard.rows.StampOf(row);
        stamp.frequency = freqs == nullptr ? 0 : freqs[i];
        stamp.version = ages_.VersionAt(time, versions, i);
        if (values != nullptr && IsZero(values + i * value_bytes_)) shard.zeroed.Mark(row);
      });
}

}  // namespace kvtable
