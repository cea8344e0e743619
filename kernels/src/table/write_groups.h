// Writes of the keys of one shard: what batched writes are made of.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>

#include "base/always_inline.h"
#include "base/hash.h"
#include "memory/copy_rows.h"
#include "memory/scratch.h"
#include "table/check_batch.h"
#include "table/sharded_table.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

inline uint32_t SaturatingAdd(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

inline void StampRow(RowStamp* row, Stamp stamp) {
  row->frequency = SaturatingAdd(row->frequency, stamp.frequency);
  row->version = stamp.version;
}

template <bool kOnlyNew, class Check, class Hint, class PrefetchInput, class Write>
void ShardedTable::WriteGroup(const BatchTime& time, const ShardGroups::Group& group, bool existing_only,
                              const Check& check, const Hint& hint, const PrefetchInput& prefetch_input,
                              const Write& write) {
  Shard& shard = *shards_[static_cast<size_t>(group.shard)];
  std::lock_guard<RwSpinlock> hold(shard.lock);
  check(shard);
  // Of a table that spills, as many keys at a time as there are surely places for in memory.
  ShardGroups::Group part = group;
  for (int64_t done = 0; done < group.count; done += part.count) {
    if (__builtin_expect(spill_ != nullptr, 0)) {
      const int64_t count = std::min<int64_t>(group.count - done, shard.rows.cache()->most_rows());
      part = {group.shard, group.keys + done, group.positions + done, count};
      BringIn(&shard, part, existing_only, hint);
    }
    WriteRows<kOnlyNew>(time, &shard, part, existing_only, hint, prefetch_input, write);
  }
}

template <class Hint>
void ShardedTable::BringIn(Shard* shard, const ShardGroups::Group& group, bool existing_only,
                           const Hint& hint) {
  Scratch<uint32_t> there(static_cast<size_t>(group.count));
  size_t count = 0;
  const uint32_t known_rows = shard->rows.high_water();
  for (int64_t i = 0; i < group.count; ++i) {
    if (i + kAhead < group.count) {
      const uint32_t next = hint(group.positions[i + kAhead]);
      if (next < known_rows) {
        __builtin_prefetch(shard->rows.StampOf(next));
      } else {
        __builtin_prefetch(shard->index.Home(Mix64(group.keys[i + kAhead])));
      }
    }
    const uint64_t key = group.keys[i];
    uint32_t row = hint(group.positions[i]);
    if (row >= known_rows || shard->rows.StampOf(row)->key != key || !shard->rows.IsLive(row)) {
      row = shard->index.Find(key, shard->index.Home(Mix64(key)));
    }
    if (row != BucketIndex::kNoRow) there[count++] = row;
  }
  const size_t more = existing_only ? 0 : static_cast<size_t>(group.count) - count;
  shard->rows.cache()->BringIn(there.data(), count, more);
}

template <bool kOnlyNew, class Hint, class PrefetchInput, class Write>
KVTABLE_ALWAYS_INLINE inline void ShardedTable::WriteRows(const BatchTime& time, Shard* of_group,
                                                          const ShardGroups::Group& group, bool existing_only,
                                                          const Hint& hint,
                                                          const PrefetchInput& prefetch_input,
                                                          const Write& write) {
  Shard& shard = *of_group;
  const int64_t row_bytes = shard.rows.row_bytes();
  const uint32_t known_rows = shard.rows.high_water();
  const auto has_hint = [&](int64_t i)
                            KVTABLE_ALWAYS_INLINE { return hint(group.positions[i]) < known_rows; };
  const auto prefetch_bucket = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    if (!has_hint(i)) __builtin_prefetch(shard.index.Home(Mix64(group.keys[i])), 1);
  };
  const auto prefetch_row = [&](uint32_t row) KVTABLE_ALWAYS_INLINE {
    PrefetchRow<kAnyBytes, true>(shard.rows.Row(row), row_bytes);
    __builtin_prefetch(shard.rows.StampOf(row), 1);
  };
  // What is known of key i, at i modulo the size: its row, or kNoRow; then where the search goes on, or
  // null. A row that was found stays the key's: nobody else may remove it now.
  std::array<uint32_t, kAhead> found;
  std::array<const Bucket*, kAhead> next;
  const auto search_home = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    uint32_t& row = found[static_cast<size_t>(i % kAhead)];
    const Bucket*& on = next[static_cast<size_t>(i % kAhead)];
    on = nullptr;
    if (has_hint(i)) {
      row = hint(group.positions[i]);
      prefetch_row(row);
    } else {
      const uint64_t key = group.keys[i];
      const Bucket* const home = shard.index.Home(Mix64(key));
      row = BucketIndex::Match(key, home);
      if (row != BucketIndex::kNoRow) {
        prefetch_row(row);
      } else {
        on = shard.index.Next(home, home);
        __builtin_prefetch(on, 1);
      }
    }
    prefetch_input(group.positions[i]);
  };
  const auto search_on = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    const Bucket* const on = next[static_cast<size_t>(i % kAhead)];
    if (on == nullptr) return;
    const uint64_t key = group.keys[i];
    uint32_t& row = found[static_cast<size_t>(i % kAhead)];
    row = shard.index.FindFrom(key, on, shard.index.Home(Mix64(key)));
    if (row != BucketIndex::kNoRow) prefetch_row(row);
  };
  const Bucket* first_bucket = shard.index.Home(0);
  for (int64_t i = 0; i < std::min(2 * kAhead, group.count); ++i) prefetch_bucket(i);
  for (int64_t i = 0; i < std::min(kAhead, group.count); ++i) search_home(i);
  for (int64_t i = 0; i < group.count; ++i) {
    if (i + 2 * kAhead < group.count) prefetch_bucket(i + 2 * kAhead);
    if (i + kAhead / 2 < group.count) search_on(i + kAhead / 2);
    const uint64_t key = group.keys[i];
    bool is_new = false;
    uint32_t row = found[static_cast<size_t>(i % kAhead)];
    const bool still = row != BucketIndex::kNoRow &&
                       (!has_hint(i) || (shard.rows.StampOf(row)->key == key && shard.rows.IsLive(row)));
    const bool may_insert = !existing_only && padding_key_ != key;
    if (!still) {
      row = may_insert ? shard.FindOrInsert(key, Mix64(key), &is_new)
                       : shard.index.Find(key, shard.index.Home(Mix64(key)));
    }
    if (time.expired_before != 0 && row != BucketIndex::kNoRow && !is_new &&
        time.HasExpired(shard.rows.StampOf(row)->version)) {
      row = may_insert ? Renew(group.shard, key, row) : BucketIndex::kNoRow;
      is_new = may_insert;
    }
    if (i + kAhead < group.count) search_home(i + kAhead);  // takes the place of key i
    if (row == BucketIndex::kNoRow) continue;
    if (is_new || !kOnlyNew) shard.BeforeWrite(row, is_new);
    if (is_new && shard.index.Home(0) != first_bucket) {  // the index grew: its old buckets are gone
      next.fill(nullptr);
      first_bucket = shard.index.Home(0);
    }
    write(shard, row, key, group.positions[i], is_new);
  }
}

template <class Check, class PrefetchInput, class Write>
void ShardedTable::WriteBatch(const BatchTime& time, const void* keys, int64_t n, bool existing_only,
                              ParallelFor& threads, const Check& check, const PrefetchInput& prefetch_input,
                              const Write& write) {
  CheckBatch(n);
  AwaitOwnRoomAside();
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const ShardGroups groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads);
    RunTasks(threads, groups.size(), [&](int64_t g) {
      WriteGroup<false>(time, groups[g], existing_only, check, NoHint{}, prefetch_input, write);
    });
  });
}

}  // namespace kvtable
