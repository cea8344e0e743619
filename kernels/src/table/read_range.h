// Lookups of a range of keys, block by block: what batched reads are made of.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "base/always_inline.h"
#include "base/hash.h"
#include "memory/copy_rows.h"
#include "table/block_hold.h"
#include "table/check_batch.h"
#include "table/find_rows.h"
#include "table/rows_writer.h"
#include "table/sharded_table.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

inline constexpr int64_t kRowsAhead = 32;    // rows of a lookup asked for before the one being copied
inline constexpr int64_t kOutputAhead = 16;  // rows of the output asked for before the one being written
inline constexpr int64_t kLeastKeysPerTask = 2048;  // of a lookup

// Up to which row the output of a lookup is asked for while it is written: to the `end`, or 0 where none is. One row behind
// the other, the hardware foresees where they go, but on some CPUs not early enough to have the lines for writing when the
// copy comes.
inline int64_t AskTo(const RowsOut& out, int64_t row_bytes, int64_t end) {
  return out.where == nullptr && row_bytes >= BestWriteRequests().in_order_from ? end : 0;
}

inline constexpr auto kToTheEnd = [](int64_t) { return true; };

// The keys of a block: those from `first` on, or those that a list names.
struct ConsecutiveKeys {
  int64_t first;
  KVTABLE_ALWAYS_INLINE int64_t operator[](int64_t i) const { return first + i; }
};
struct ListedKeys {
  int64_t first;
  const uint32_t* list;
  KVTABLE_ALWAYS_INLINE int64_t operator[](int64_t i) const { return first + int64_t{list[i]}; }
};

// Asks for the keys of the block that begins at `begin`. Its keys may fill a page, and the hardware foresees nothing
// beyond the page that it is in.
template <class Key>
KVTABLE_ALWAYS_INLINE inline void PrefetchKeys(const Key* begin, const Key* end) {
  constexpr int64_t kInLine = 64 / sizeof(Key);
  const Key* const stop = begin + std::min<int64_t>(kBlock, end - begin);
  for (const Key* key = begin; key < stop; key += kInLine) __builtin_prefetch(key, 0, 2);
}

template <class Which, class Places, class LocateRow, class Prefetch, class Visit>
void ShardedTable::ReadHeld(const BatchTime& time, const Which& which, int64_t count, const Places& places,
                            const LocateRow& locate, const Prefetch& prefetch, const Visit& visit,
                            FileReads* reads, bool only_memory) {
  using Pointer = decltype(locate(int64_t{0}, size_t{0}, places.shard(0), uint32_t{0}));
  std::array<uint32_t, kBlock> rows;
  // Where each row is, or null.
  std::array<uintptr_t, kBlock> found;
  // Where rows may have expired, the stamps of those that were found: asked for when they are.
  const bool may_expire = time.expired_before != 0;
  std::array<const RowStamp*, kBlock> stamps;
  // First where the rows are, then the rows: each pass asks for memory some steps before it reads it, and
  // the last does nothing else.
  FindRows(places, count, rows.data());
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t row = rows[static_cast<size_t>(i)];
    found[static_cast<size_t>(i)] = 0;
    if (__builtin_expect(row == BucketIndex::kNoRow, 0)) continue;
    const Shard& shard = places.shard(i);
    if (__builtin_expect(may_expire, 0)) {
      const RowStamp* const stamp = shard.rows.StampOf(row);
      __builtin_prefetch(stamp);
      stamps[static_cast<size_t>(i)] = stamp;
    }
    found[static_cast<size_t>(i)] =
        reinterpret_cast<uintptr_t>(locate(which[i], places.number(i), shard, row));
  }
  const auto prefetch_row = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    const uintptr_t place = found[static_cast<size_t>(i)];
    if (place != 0) prefetch(places.shard(i), reinterpret_cast<Pointer>(place));
  };
  for (int64_t i = 0; may_expire && i < count; ++i) {
    uintptr_t& place = found[static_cast<size_t>(i)];
    if (place != 0 && time.HasExpired(stamps[static_cast<size_t>(i)]->version)) place = 0;
  }
  if (__builtin_expect(reads != nullptr, 0)) FindSpilled(places, found.data(), count, only_memory, reads);
  for (int64_t i = 0; i < std::min(kRowsAhead, count); ++i) prefetch_row(i);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) prefetch_row(i + kRowsAhead);
    visit(which[i], places.shard(i), reinterpret_cast<Pointer>(found[static_cast<size_t>(i)]));
  }
}

template <class Places>
void ShardedTable::FindSpilled(const Places& places, uintptr_t* found, int64_t count, bool only_memory,
                               FileReads* reads) {
  reads->Clear();
  std::array<uint32_t, kBlock> of_read;
  for (int64_t i = 0; i < count; ++i) {
    if ((found[i] & RowStore::kByNumber) == 0) continue;
    const uint32_t row = static_cast<uint32_t>(found[i]);
    const RowCache& cache = *places.shard(i).rows.cache();
    if (cache.IsHere(row)) {
      found[i] = reinterpret_cast<uintptr_t>(cache.Row(row));
    } else if (only_memory) {
      found[i] = 0;
    } else {
      of_read[reads->Add(cache, row)] = static_cast<uint32_t>(i);
    }
  }
  reads->Run();
  for (size_t r = 0; r < reads->size(); ++r) found[of_read[r]] = reinterpret_cast<uintptr_t>(reads->Row(r));
}

template <class Key, class GoOn, class Check, class LocateRow, class Prefetch, class Visit>
int64_t ShardedTable::ReadRange(const BatchTime& time, const Key* keys, int64_t begin, int64_t end,
                                const GoOn& go_on, const Check& check, const LocateRow& locate,
                                const Prefetch& prefetch, const Visit& visit, bool only_memory) const {
  std::array<uint64_t, kBlock> hashes;
  const OneTable places{shards_.data(), shard_bits_, hashes.data()};
  // Keys that were put off, as distances from `begin`: writers had their shards. And of a block, those that were not.
  std::array<uint32_t, 8 * kBlock> put_off;
  int64_t waiting = 0;
  std::array<uint32_t, kBlock> picked;
  FileReads file_reads;
  FileReads* const reads = spill_ == nullptr ? nullptr : &file_reads;
  // Reads those of a block's keys whose shards can be had, and puts off the others.
  const auto read_block = [&](const auto& which, int64_t count, bool waits) {
    uint64_t touched = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = Mix64(WidenKey(keys[which[i]]));
      hashes[static_cast<size_t>(i)] = hash;
      touched |= uint64_t{1} << ShardOf(hash, shard_bits_);
    }
    const BlockHold hold(&seats_, shards_, touched, waits);
    for (uint64_t left = hold.shards(); left != 0; left &= left - 1) {
      check(*shards_[static_cast<size_t>(__builtin_ctzll(left))]);
    }
    if (__builtin_expect(hold.shards() == touched, 1)) {
      ReadHeld(time, which, count, places, locate, prefetch, visit, reads, only_memory);
      return;
    }
    int64_t held = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = hashes[static_cast<size_t>(i)];
      const uint32_t key = static_cast<uint32_t>(which[i] - begin);
      if ((hold.shards() >> ShardOf(hash, shard_bits_) & 1) == 0) {
        put_off[static_cast<size_t>(waiting++)] = key;
      } else {
        picked[static_cast<size_t>(held)] = key;
        hashes[static_cast<size_t>(held++)] = hash;
      }
    }
    ReadHeld(time, ListedKeys{begin, picked.data()}, held, places, locate, prefetch, visit, reads,
             only_memory);
  };
  // Until no more than `most` wait: those first that were put off first, for writers may have gone on since.
  const auto read_put_off = [&](int64_t most) {
    while (waiting > most) {
      std::array<uint32_t, kBlock> list;
      const int64_t count = std::min(waiting, kBlock);
      std::copy_n(put_off.data(), count, list.data());
      std::copy(put_off.data() + count, put_off.data() + waiting, put_off.data());
      waiting -= count;
      read_block(ListedKeys{begin, list.data()}, count, true);
    }
  };
  int64_t at = begin;
  while (at < end) {
    if (waiting > 7 * kBlock) read_put_off(4 * kBlock);
    const int64_t count = std::min(kBlock, end - at);
    PrefetchKeys(keys + at + count, keys + end);
    read_block(ConsecutiveKeys{at}, count, false);
    at += count;
    if (!go_on(at)) break;
  }
  read_put_off(0);
  return at;
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
      ReadRange(time, static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), kToTheEnd, check, locate,
                prefetch, visit);
    });
  });
}

template <class Key, class GoOn, class Missed>
int64_t ShardedTable::ReadValues(const BatchTime& time, const Key* keys, int64_t begin, int64_t end,
                                 const RowsOut& out, bool* found, const GoOn& go_on, const Missed& missed,
                                 bool only_memory) const {
  int64_t read_to = begin;
  const WriteRequests requests = BestWriteRequests();
  VisitRowCopy(out, value_type_, dim_, [&](const auto copy) {
    const int64_t ask_to = AskTo(out, copy.out_bytes(), end);
    read_to = ReadRange(
        time, keys, begin, end, go_on, [](const Shard&) {},
        [&out, copy, requests](int64_t i, size_t number, const Shard& shard, uint32_t row)
            KVTABLE_ALWAYS_INLINE -> const char* {
              const int64_t place = out.PlaceOf(i);
              // Scattered: the hardware foresees nothing of it.
              if (out.where != nullptr) {
                copy.PrefetchOut(out.rows + place * copy.out_bytes(), requests.to_be_written);
              }
              if (out.positions != nullptr) out.positions[place] = uint64_t{number} << 32 | row;
              return reinterpret_cast<const char*>(shard.rows.Find(row));
            },
        [copy](const Shard&, const char* row) KVTABLE_ALWAYS_INLINE { copy.Prefetch(row); },
        [&](int64_t i, const Shard&, const char* row) {
          if (found != nullptr) found[i] = row != nullptr;
          const int64_t place = out.PlaceOf(i);
          if (i + kOutputAhead < ask_to) {
            copy.PrefetchOut(out.rows + (i + kOutputAhead) * copy.out_bytes(), requests.to_be_written);
          }
          if (row != nullptr) {
            copy.Copy(out.rows + place * copy.out_bytes(), row);
          } else {
            if (out.positions != nullptr) out.positions[place] = kNoPosition;
            missed(i);
          }
        },
        only_memory);
  });
  return read_to;
}

}  // namespace kvtable
