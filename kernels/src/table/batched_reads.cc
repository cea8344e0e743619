// Lookups that change nothing.
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "table/check_batch.h"
#include "table/read_range.h"
#include "threads/run_tasks.h"

namespace kvtable {
namespace {

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

void ShardedTable::Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing,
                          const void* defaults, int64_t num_defaults, bool* found,
                          ParallelFor& threads) const {
  CheckBatch(n);
  if (missing == Missing::kDefault && n > 0 && (defaults == nullptr || num_defaults <= 0)) {
    ThrowInvalid("Gather with Missing::kDefault got " + std::to_string(num_defaults) +
                 " default rows; expected at least one.");
  }
  const BatchTime time = ages_.Begin();
  // Asked for where it is needed only: small lookups from many threads would meet at its mutex.
  std::shared_ptr<const InitialValue> init;
  std::once_flag asked;
  const char* const default_rows = static_cast<const char*>(defaults);
  const RowsWriter rows(out, value_type_, dim_);
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const Key* const typed = static_cast<const Key*>(keys);
    const auto on_missing = [&](int64_t i) {
      switch (missing) {
        case Missing::kZeros:
          rows.Zero(i);
          break;
        case Missing::kInitial:
          std::call_once(asked, [&] { init = initial(); });
          rows.Make(i, [&](char* to) { init->Fill(WidenKey(typed[i]), to); });
          break;
        case Missing::kDefault:
          rows.Copy(i, default_rows + i % num_defaults * value_bytes_);
          break;
      }
    };
    const Ranges ranges(n, kLeastKeysPerTask, threads);
    RunTasks(threads, ranges.count(), [&](int64_t r) {
      ReadValues(time, typed, ranges.begin(r), ranges.end(r), out, found, kToTheEnd, on_missing);
    });
  });
}

void ShardedTable::GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                                 ParallelFor& threads) const {
  CheckBatch(n);
  const BatchTime time = ages_.Begin();
  const std::shared_ptr<const InitialValue> init = initial();
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const Key* const typed = static_cast<const Key*>(keys);
    const Ranges ranges(n, kLeastKeysPerTask, threads);
    RunTasks(threads, ranges.count(), [&](int64_t r) {
      std::vector<char> fresh;  // what a missing row would hold
      ReadRange(
          time, typed, ranges.begin(r), ranges.end(r), kToTheEnd,
          [&](const Shard& shard) {
            for (const ColumnOut& column : out) CheckColumn(shard, column);
          },
          [](int64_t, size_t, const Shard& shard, uint32_t row) KVTABLE_ALWAYS_INLINE -> const char* {
            return reinterpret_cast<const char*>(shard.rows.Find(row));
          },
          [](const Shard& shard, const char* row)
              KVTABLE_ALWAYS_INLINE { PrefetchRow<kAnyBytes>(row, shard.rows.row_bytes()); },
          [&](int64_t i, const Shard& shard, const char* row) {
            if (found != nullptr) found[i] = row != nullptr;
            if (row == nullptr) {
              fresh.resize(static_cast<size_t>(shard.layout->row_bytes));
              init->Fill(WidenKey(typed[i]), fresh.data());
              shard.layout->InitializeSlots(fresh.data());
              row = fresh.data();
            }
            for (const ColumnOut& column : out) {
              const RowLayout::Column& c = shard.layout->columns[static_cast<size_t>(column.column)];
              std::memcpy(static_cast<char*>(column.data) + i * c.bytes, row + c.offset,
                          static_cast<size_t>(c.bytes));
            }
          });
    });
  });
}

void ShardedTable::Contains(const void* keys, int64_t n, bool* out, ParallelFor& threads) const {
  ReadBatch(
      keys, n, threads, [](const Shard&) {},
      [](int64_t, size_t, const Shard& shard, uint32_t) { return &shard; }, [](const Shard&, const Shard*) {},
      [out](int64_t i, const Shard&, const Shard* there) { out[i] = there != nullptr; });
}

void ShardedTable::GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                                ParallelFor& threads) const {
  ReadBatch(
      keys, n, threads, [](const Shard&) {},
      [](int64_t, size_t, const Shard& shard, uint32_t row)
          KVTABLE_ALWAYS_INLINE -> const RowStamp* { return shard.rows.StampOf(row); },
      [](const Shard&, const RowStamp* stamp) KVTABLE_ALWAYS_INLINE { __builtin_prefetch(stamp); },
      [freqs, versions](int64_t i, const Shard&, const RowStamp* stamp) {
        if (freqs != nullptr) freqs[i] = stamp == nullptr ? 0 : stamp->frequency;
        if (versions != nullptr) versions[i] = stamp == nullptr ? 0 : stamp->version;
      });
}

void ShardedTable::Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const {
  ReadBatch(
      keys, n, threads, [](const Shard&) {},
      [positions](int64_t i, size_t number, const Shard& shard, uint32_t row) KVTABLE_ALWAYS_INLINE {
        positions[i] = uint64_t{number} << 32 | row;
        return &shard;
      },
      [](const Shard&, const Shard*) {},
      [positions](int64_t i, const Shard&, const Shard* there) {
        if (there == nullptr) positions[i] = kNoPosition;
      });
}

void ShardedTable::KeysAt(const uint64_t* positions, int64_t n, void* keys) const {
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    for (int64_t i = 0; i < n; ++i) {
      const Shard& shard = *shards_[positions[i] >> 32];
      std::shared_lock<ShardLock> hold(shard.lock);
      static_cast<Key*>(keys)[i] =
          static_cast<Key>(shard.rows.StampOf(static_cast<uint32_t>(positions[i]))->key);
    }
  });
}

void ShardedTable::Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const {
  ReadBatch(
      keys, n, threads, [](const Shard&) {},
      [out](int64_t i, size_t, const Shard& shard, uint32_t row) {
        out[i] = shard.zeroed.Has(row);
        return &shard;
      },
      [](const Shard&, const Shard*) {},
      [out](int64_t i, const Shard&, const Shard* there) { out[i] = there != nullptr && out[i]; });
}

}  // namespace kvtable
