// Writes of the keys of one shard: what batched writes are made of.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/always_inline.h"
#include "base/hash.h"
#include "memory/copy_rows.h"
#include "memory/scratch.h"
#include "table/check_batch.h"
#include "table/sharded_table.h"
#include "threads/processors.h"
#include "threads/run_phases.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

inline uint32_t SaturatingAdd(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

inline void StampRow(RowStamp* row, Stamp stamp) {
  if (stamp.is_rewrite) return;
  row->frequency = SaturatingAdd(row->frequency, stamp.frequency);
  row->version = stamp.version;
}

inline constexpr int64_t kKeysPerTurn = 256;  // that are written before lookups that wait are let in
inline constexpr int64_t kKeysBroughtIn = 16 * kKeysPerTurn;  // from a file at a time

template <class Key, class Write>
void ShardedTable::ForGroups(ShardGroups<Key>& groups, ParallelFor& threads, const Write& write) {
  static_assert(kMaxShards <= 64);
  std::atomic<uint64_t> left;
  const auto place = [&] {
    groups.Place();
    const int count = groups.size();
    left.store(count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1, std::memory_order_relaxed);
  };
  const auto take = [&] {
    // Threads begin far from each other: so they seldom want the same one, and each finds again what it wrote before.
    const uint64_t first = PlaceOfProcessor(static_cast<uint64_t>(groups.size()));
    for (;;) {
      const uint64_t open = left.load(std::memory_order_relaxed);
      const uint64_t later = open >> first << first;
      uint64_t taken = 0;
      for (const uint64_t some : {later, open & ~later}) {
        for (uint64_t bits = some; bits != 0 && taken == 0; bits &= bits - 1) {
          const Shard& shard = *shards_[static_cast<size_t>(groups[__builtin_ctzll(bits)].shard)];
          if (!shard.lock.is_wanted()) taken = bits & -bits;
        }
      }
      if (taken == 0) taken = later != 0 ? later & -later : open & -open;
      if ((left.fetch_and(~taken, std::memory_order_relaxed) & taken) != 0) return __builtin_ctzll(taken);
    }
  };
  const auto write_one = [&](int64_t) { write(groups[take()]); };
  if (groups.parts() == 1) {
    groups.Count(0);
    place();
    groups.Sort(0);
    RunTasks(threads, groups.size(), write_one);
  } else {
    const auto parts = [&] { return groups.parts(); };
    RunPhases(threads, int64_t{1} << shard_bits_, Phase{parts, [&](int64_t part) { groups.Count(part); }},
              Phase{[] { return 1; }, [&](int64_t) { place(); }},
              Phase{parts, [&](int64_t part) { groups.Sort(part); }},
              Phase{[&] { return groups.size(); }, write_one});
  }
}

template <bool kOnlyNew, class Check, class PrefetchInput, class Write>
void ShardedTable::WriteGroup(const BatchTime& time, const ShardGroup& group, bool existing_only,
                              const Check& check, const PrefetchInput& prefetch_input, const Write& write) {
  for (int64_t begin = 0; begin < group.count;) {
    begin += WriteTurn<kOnlyNew>(time, group.From(begin), existing_only, check, prefetch_input, write);
  }
}

template <bool kOnlyNew, class Check, class PrefetchInput, class Write>
int64_t ShardedTable::WriteTurn(const BatchTime& time, const ShardGroup& group, bool existing_only,
                                const Check& check, const PrefetchInput& prefetch_input, const Write& write) {
  Shard& shard = *shards_[static_cast<size_t>(group.shard)];
  std::lock_guard<ShardLock> hold(shard.lock);
  check(shard);
  // Of a table that spills, as many keys at a time as there are surely places for in memory. When a turn ends, rows that
  // it brought in may go again: the next one begins with those that it has left.
  int64_t done = 0;
  while (done < group.count) {
    ShardGroup part = group.From(done);
    if (__builtin_expect(spill_ != nullptr, 0)) {
      part.count = std::min<int64_t>({part.count, kKeysBroughtIn, shard.rows.cache()->most_rows()});
      BringIn(&shard, part, existing_only);
    }
    const int64_t written = WriteRows<kOnlyNew>(time, &shard, part, existing_only, prefetch_input, write);
    done += written;
    if (written < part.count || (!kOnlyNew && shard.lock.readers_wait())) break;
  }
  return done;
}

inline void ShardedTable::BringIn(Shard* shard, const ShardGroup& group, bool existing_only) {
  Scratch<uint32_t> there(static_cast<size_t>(group.count));
  size_t count = 0;
  const uint32_t known_rows = shard->rows.high_water();
  for (int64_t i = 0; i < group.count; ++i) {
    if (i + kAhead < group.count) {
      const uint32_t next = group.Hint(i + kAhead);
      if (next < known_rows) {
        __builtin_prefetch(shard->rows.StampOf(next));
      } else {
        __builtin_prefetch(shard->index.Home(Mix64(group.keys[i + kAhead])).bucket());
      }
    }
    const uint64_t key = group.keys[i];
    uint32_t row = group.Hint(i);
    if (row >= known_rows || shard->rows.StampOf(row)->key != key || !shard->rows.IsLive(row)) {
      row = shard->index.Find(Mix64(key));
    }
    if (row != BucketIndex::kNoRow) there[count++] = row;
  }
  const size_t more = existing_only ? 0 : static_cast<size_t>(group.count) - count;
  shard->rows.cache()->BringIn(there.data(), count, more);
}

template <bool kOnlyNew, class PrefetchInput, class Write>
KVTABLE_ALWAYS_INLINE inline int64_t ShardedTable::WriteRows(const BatchTime& time, Shard* of_group,
                                                             const ShardGroup& group, bool existing_only,
                                                             const PrefetchInput& prefetch_input,
                                                             const Write& write) {
  Shard& shard = *of_group;
  const int64_t row_bytes = shard.rows.row_bytes();
  const uint32_t known_rows = shard.rows.high_water();
  const auto has_hint = [&](int64_t i) KVTABLE_ALWAYS_INLINE { return group.Hint(i) < known_rows; };
  const auto prefetch_bucket = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    if (!has_hint(i)) {
      __builtin_prefetch(shard.index.Home(Mix64(group.keys[i])).bucket(), 1);
    } else {
      shard.rows.PrefetchPlace(group.Hint(i));
    }
  };
  // Where a row is asked for to be written, the rest of a wide one goes to the second-level cache: more lines in the first,
  // and lookups after an update take up to twice as long, which read neighbours of their rows then.
  const WriteRequests requests = BestWriteRequests();
  const auto prefetch_row = [&](uint32_t row) KVTABLE_ALWAYS_INLINE {
    constexpr int64_t kMostBytes = 2048;  // the rest is foreseen by the hardware
    constexpr int64_t kToFirstLevel = 256;
    constexpr int kSecondLevel = 2;
    const char* const at = shard.rows.Row(row);
    const int64_t bytes = std::min(row_bytes, kMostBytes);
    const RowStamp* const stamp = shard.rows.StampOf(row);
    int64_t b = 0;
    if (requests.to_be_written) {
      for (; b < std::min(bytes, kToFirstLevel); b += 64) PrefetchToWrite(at + b);
      PrefetchToWrite(stamp);
    } else {
      __builtin_prefetch(stamp, 0, kSecondLevel);
    }
    for (; b < bytes; b += 64) __builtin_prefetch(at + b, 0, kSecondLevel);
    __builtin_prefetch(at + bytes - 1, 0, kSecondLevel);
    shard.rows.PrefetchFrame(row);
  };
  // What is known of key i, at i modulo the size: its row, or kNoRow; then where the search goes on, or
  // null. A row that was found stays the key's: nobody else may remove it now.
  const int64_t ahead = requests.ahead;
  std::array<uint32_t, WriteRequests::kMostAhead> found;
  std::array<BucketRef, WriteRequests::kMostAhead> next;
  const auto search_home = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    uint32_t& row = found[static_cast<size_t>(i % WriteRequests::kMostAhead)];
    BucketRef& on = next[static_cast<size_t>(i % WriteRequests::kMostAhead)];
    on = {};
    if (has_hint(i)) {
      row = group.Hint(i);
      prefetch_row(row);
    } else {
      const uint64_t hash = Mix64(group.keys[i]);
      const BucketRef home = shard.index.Home(hash);
      row = BucketIndex::Match(hash, home);
      if (row != BucketIndex::kNoRow) {
        prefetch_row(row);
      } else {
        on = shard.index.Next(home, home);
        __builtin_prefetch(on.bucket(), 1);
      }
    }
    prefetch_input(group.positions[i]);
  };
  const auto search_on = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    const BucketRef on = next[static_cast<size_t>(i % WriteRequests::kMostAhead)];
    if (!on) return;
    const uint64_t hash = Mix64(group.keys[i]);
    uint32_t& row = found[static_cast<size_t>(i % WriteRequests::kMostAhead)];
    row = shard.index.FindFrom(hash, on, shard.index.Home(hash));
    if (row != BucketIndex::kNoRow) prefetch_row(row);
  };
  BucketRef first_bucket = shard.index.Home(0);
  for (int64_t i = 0; i < std::min(2 * ahead, group.count); ++i) prefetch_bucket(i);
  for (int64_t i = 0; i < std::min(ahead, group.count); ++i) search_home(i);
  for (int64_t i = 0; i < group.count; ++i) {
    if (!kOnlyNew && i > 0 && i % kKeysPerTurn == 0 && shard.lock.readers_wait()) return i;
    if (i + 2 * ahead < group.count) prefetch_bucket(i + 2 * ahead);
    if (i + ahead / 2 < group.count) search_on(i + ahead / 2);
    const uint64_t key = group.keys[i];
    bool is_new = false;
    uint32_t row = found[static_cast<size_t>(i % WriteRequests::kMostAhead)];
    const bool still = row != BucketIndex::kNoRow &&
                       (!has_hint(i) || (shard.rows.StampOf(row)->key == key && shard.rows.IsLive(row)));
    const bool may_insert = !existing_only && padding_key_ != key;
    if (!still) {
      row = may_insert ? shard.FindOrInsert(key, Mix64(key), &is_new) : shard.index.Find(Mix64(key));
    }
    if (time.expired_before != 0 && row != BucketIndex::kNoRow && !is_new &&
        time.HasExpired(shard.rows.StampOf(row)->version)) {
      row = may_insert ? Renew(group.shard, key, row) : BucketIndex::kNoRow;
      is_new = may_insert;
    }
    if (i + ahead < group.count) search_home(i + ahead);  // may take the place of key i
    if (row == BucketIndex::kNoRow) continue;
    if (is_new || !kOnlyNew) shard.BeforeWrite(row, is_new);
    if (is_new && shard.index.Home(0) != first_bucket) {  // the index grew: its old buckets are gone
      next.fill({});
      first_bucket = shard.index.Home(0);
    }
    write(shard, row, key, group.positions[i], is_new);
  }
  return group.count;
}

template <class Check, class PrefetchInput, class Write>
void ShardedTable::WriteBatch(const BatchTime& time, const void* keys, int64_t n, bool existing_only,
                              ParallelFor& threads, const Check& check, const PrefetchInput& prefetch_input,
                              const Write& write) {
  CheckBatch(n);
  AwaitOwnRoomAside();
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    ShardGroups<Key> groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads.threads());
    ForGroups(groups, threads, [&](const ShardGroup& group) {
      WriteGroup<false>(time, group, existing_only, check, prefetch_input, write);
    });
  });
}

}  // namespace kvtable
