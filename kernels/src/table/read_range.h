// Lookups of a range of keys, block by block: what batched reads are made of.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "base/always_inline.h"
#include "base/hash.h"
#include "memory/copy_rows.h"
#include "table/check_batch.h"
#include "table/sharded_table.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

inline constexpr int64_t kBlock = 2048;             // keys of a lookup under one set of locks
inline constexpr int64_t kRowsAhead = 32;           // rows of a lookup asked for before the one being copied
inline constexpr int64_t kLeastKeysPerTask = 2048;  // of a lookup

// The shared locks of a set of shards, a bit for each.
class SharedLocks {
 public:
  SharedLocks(const std::vector<std::unique_ptr<Shard>>& all, uint64_t shards) : all_(all), shards_(shards) {
    for (uint64_t left = shards; left != 0; left &= left - 1) At(left).lock.lock_shared();
  }
  ~SharedLocks() {
    for (uint64_t left = shards_; left != 0; left &= left - 1) At(left).lock.unlock_shared();
  }
  SharedLocks(const SharedLocks&) = delete;
  SharedLocks& operator=(const SharedLocks&) = delete;

 private:
  const Shard& At(uint64_t left) const { return *all_[static_cast<size_t>(__builtin_ctzll(left))]; }
  const std::vector<std::unique_ptr<Shard>>& all_;
  const uint64_t shards_;
};

template <class Key, class Check, class LocateRow, class Prefetch, class Visit>
void ShardedTable::ReadRange(const BatchTime& time, const Key* keys, int64_t begin, int64_t end,
                             const Check& check, const LocateRow& locate, const Prefetch& prefetch,
                             const Visit& visit, bool only_memory) const {
  using Pointer = decltype(locate(int64_t{0}, size_t{0}, *shards_[0], uint32_t{0}));
  const std::unique_ptr<Shard>* const shards = shards_.data();
  // The key's hash, and from its first step on its home bucket, with the shard in the bits that alignment
  // leaves.
  std::array<uint64_t, kBlock> homes;
  static_assert(alignof(Bucket) == kMaxShards);
  // What the search for key i has come to: null, the pointer, or the bucket to search next.
  std::array<uintptr_t, kBlock> found;
  // Where rows may have expired, the stamps of those that were found: asked for when they are.
  const bool may_expire = time.expired_before != 0;
  std::array<const RowStamp*, kBlock> stamps;
  // Marks the last: a bit that no address of a process has.
  constexpr uintptr_t kUnfinished = uintptr_t{1} << 63;
  FileReads reads;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t count = std::min(kBlock, end - block);
    const Key* const block_keys = keys + block;
    uint64_t touched = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = Mix64(WidenKey(block_keys[i]));
      homes[static_cast<size_t>(i)] = hash;
      touched |= uint64_t{1} << ShardOf(hash, shard_bits_);
    }
    const SharedLocks hold(shards_, touched);
    for (uint64_t left = touched; left != 0; left &= left - 1) {
      check(*shards_[static_cast<size_t>(__builtin_ctzll(left))]);
    }
    // First where the rows are, then the rows: each pass asks for memory some steps before it reads it, and
    // the second does nothing else.
    const auto shard_at = [&](int64_t i) KVTABLE_ALWAYS_INLINE -> const Shard& {
      return *shards[homes[static_cast<size_t>(i)] % kMaxShards];
    };
    const auto home_at = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      return reinterpret_cast<const Bucket*>(homes[static_cast<size_t>(i)] / kMaxShards * kMaxShards);
    };
    const auto located = [&](int64_t i, uint32_t row) KVTABLE_ALWAYS_INLINE {
      const size_t shard = homes[static_cast<size_t>(i)] % kMaxShards;
      if (__builtin_expect(may_expire, 0)) {
        const RowStamp* const stamp = shards[shard]->rows.StampOf(row);
        __builtin_prefetch(stamp);
        stamps[static_cast<size_t>(i)] = stamp;
      }
      return reinterpret_cast<uintptr_t>(locate(block + i, shard, *shards[shard], row));
    };
    const auto prefetch_bucket = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      uint64_t& home = homes[static_cast<size_t>(i)];
      const size_t shard = static_cast<size_t>(ShardOf(home, shard_bits_));
      const Bucket* const bucket = shards[shard]->index.Home(home);
      __builtin_prefetch(bucket);
      home = reinterpret_cast<uintptr_t>(bucket) | shard;
    };
    const auto search_home = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      const Bucket* const home = home_at(i);
      const uint32_t row = BucketIndex::Match(WidenKey(block_keys[i]), home);
      uintptr_t& place = found[static_cast<size_t>(i)];
      if (__builtin_expect(row != BucketIndex::kNoRow, 1)) {
        place = located(i, row);
      } else {
        const Bucket* const next = shard_at(i).index.Next(home, home);
        __builtin_prefetch(next);
        place = next == nullptr ? 0 : reinterpret_cast<uintptr_t>(next) | kUnfinished;
      }
    };
    const auto search_on = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      uintptr_t& place = found[static_cast<size_t>(i)];
      if (__builtin_expect((place & kUnfinished) == 0, 1)) return;
      const Bucket* const next = reinterpret_cast<const Bucket*>(place - kUnfinished);
      const uint32_t row = shard_at(i).index.FindFrom(WidenKey(block_keys[i]), next, home_at(i));
      place = row == BucketIndex::kNoRow ? 0 : located(i, row);
    };
    const auto prefetch_row = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      const uintptr_t place = found[static_cast<size_t>(i)];
      if (place != 0) prefetch(shard_at(i), reinterpret_cast<Pointer>(place));
    };
    for (int64_t i = 0; i < std::min(2 * kAhead, count); ++i) prefetch_bucket(i);
    for (int64_t i = 0; i < std::min(kAhead, count); ++i) search_home(i);
    for (int64_t i = 0; i < count; ++i) {
      if (i + 2 * kAhead < count) prefetch_bucket(i + 2 * kAhead);
      if (i + kAhead < count) search_home(i + kAhead);
      search_on(i);
    }
    for (int64_t i = 0; may_expire && i < count; ++i) {
      uintptr_t& place = found[static_cast<size_t>(i)];
      if (place != 0 && time.HasExpired(stamps[static_cast<size_t>(i)]->version)) place = 0;
    }
    if (__builtin_expect(spill_ != nullptr, 0))
      FindSpilled(shard_at, found.data(), count, only_memory, &reads);
    for (int64_t i = 0; i < std::min(kRowsAhead, count); ++i) prefetch_row(i);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count) prefetch_row(i + kRowsAhead);
      visit(block + i, shard_at(i), reinterpret_cast<Pointer>(found[static_cast<size_t>(i)]));
    }
  }
}

template <class ShardAt>
void ShardedTable::FindSpilled(const ShardAt& shard_at, uintptr_t* found, int64_t count, bool only_memory,
                               FileReads* reads) {
  reads->Clear();
  std::array<uint32_t, kBlock> places;
  for (int64_t i = 0; i < count; ++i) {
    if ((found[i] & RowStore::kByNumber) == 0) continue;
    const uint32_t row = static_cast<uint32_t>(found[i]);
    const RowCache& cache = *shard_at(i).rows.cache();
    if (cache.IsHere(row)) {
      found[i] = reinterpret_cast<uintptr_t>(cache.Row(row));
    } else if (only_memory) {
      found[i] = 0;
    } else {
      places[reads->Add(cache, cache.SlotOf(row))] = static_cast<uint32_t>(i);
    }
  }
  reads->Run();
  for (size_t r = 0; r < reads->size(); ++r) found[places[r]] = reinterpret_cast<uintptr_t>(reads->Row(r));
}

template <class Check, class LocateRow, class Prefetch, class Visit>
void ShardedTable::ReadBatch(const void* keys, int64_t n, ParallelFor& threads, const Check& check,
                             const LocateRow& locate, const Prefetch& prefetch, const Visit& visit) const {
  CheckBatch(n);
  const BatchTime time = ages_.Begin();
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const Ranges ranges(n, kLeastKeysPerTask, threads);
    RunTasks(threads, ranges.count(), [&](int64_t r) {
      ReadRange(time, static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), check, locate, prefetch,
                visit);
    });
  });
}

template <class Key, class Missed>
void ShardedTable::ReadValues(const BatchTime& time, const Key* keys, int64_t begin, int64_t end,
                              const RowsOut& out, bool* found, const Missed& missed, bool only_memory) const {
  const int64_t bytes = value_bytes_;
  VisitRowBytes(bytes, [&](auto known) {
    constexpr int64_t kBytes = decltype(known)::value;
    ReadRange(
        time, keys, begin, end, [](const Shard&) {},
        [&out, bytes](int64_t i, size_t number, const Shard& shard, uint32_t row)
            KVTABLE_ALWAYS_INLINE -> const char* {
              const int64_t place = out.PlaceOf(i);
              // Rows written one behind the other are foreseen by the hardware, scattered ones are not.
              if (out.where != nullptr) PrefetchRow<kBytes, true>(out.rows + place * bytes, bytes);
              if (out.positions != nullptr) out.positions[place] = uint64_t{number} << 32 | row;
              return reinterpret_cast<const char*>(shard.rows.Find(row));
            },
        [bytes](const Shard&, const char* row) KVTABLE_ALWAYS_INLINE { PrefetchRow<kBytes>(row, bytes); },
        [&](int64_t i, const Shard&, const char* row) {
          if (found != nullptr) found[i] = row != nullptr;
          const int64_t place = out.PlaceOf(i);
          if (row != nullptr) {
            CopyRow<kBytes>(out.rows + place * bytes, row, bytes);
          } else {
            if (out.positions != nullptr) out.positions[place] = kNoPosition;
            missed(i);
          }
        },
        only_memory);
  });
}

}  // namespace kvtable
