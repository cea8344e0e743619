// Copies of rows that an export has picked.
#pragma once

#include <cstring>
#include <shared_mutex>
#include <vector>

#include "memory/scratch.h"
#include "table/read_range.h"

namespace kvtable {

template <class Key, class Take>
int64_t ShardedTable::CopyPickedRange(const uint64_t* picks, int64_t count, int64_t at,
                                      const Exporter::Buffers& out, const Take& take) const {
  const int64_t first = at;
  FileReads reads;
  for (int64_t begin = 0; begin < count;) {
    const uint64_t shard_number = picks[begin] >> 32;
    int64_t end = begin;
    while (end < count && end - begin < kBlock && picks[end] >> 32 == shard_number) ++end;
    const Shard& shard = *shards_[shard_number];
    std::shared_lock<ShardLock> hold(shard.lock);
    std::vector<RowLayout::Column> columns;
    for (const ColumnOut& column : out.columns) columns.push_back(CheckColumn(shard, column));
    const auto is_there = [&](uint32_t row) {
      return row < shard.rows.high_water() && shard.rows.IsLive(row);
    };
    // Rows in the file are read before any is taken, for it may fail.
    const RowCache* const cache = shard.rows.cache();
    reads.Clear();
    for (int64_t i = begin; cache != nullptr && i < end; ++i) {
      const uint32_t row = static_cast<uint32_t>(picks[i]);
      if (is_there(row) && !cache->IsHere(row)) reads.Add(*cache, row);
    }
    reads.Run();
    size_t next_read = 0;
    for (; begin < end; ++begin) {
      const uint32_t row = static_cast<uint32_t>(picks[begin]);
      if (!is_there(row)) continue;
      const bool is_read = cache != nullptr && !cache->IsHere(row);
      const char* const from = is_read ? reads.Row(next_read++) : shard.rows.Row(row);
      if (!take(shard_number, row)) continue;
      const RowStamp& stamp = *shard.rows.StampOf(row);
      if (out.keys != nullptr) static_cast<Key*>(out.keys)[at] = static_cast<Key>(stamp.key);
      if (out.freqs != nullptr) out.freqs[at] = stamp.frequency;
      if (out.versions != nullptr) out.versions[at] = stamp.version;
      if (out.scores != nullptr || out.orders != nullptr) {
        const Rank rank = ranks_.rank_of ? ranks_.rank_of(picks[begin]) : Rank();
        if (out.scores != nullptr) out.scores[at] = rank.score;
        if (out.orders != nullptr) out.orders[at] = rank.order;
      }
      for (size_t c = 0; c < columns.size(); ++c) {
        std::memcpy(static_cast<char*>(out.columns[c].data) + at * columns[c].bytes, from + columns[c].offset,
                    static_cast<size_t>(columns[c].bytes));
      }
      ++at;
    }
  }
  return at - first;
}

template <class Take>
int64_t ShardedTable::CopyPicked(const uint64_t* picks, int64_t count, const Exporter::Buffers& out,
                                 ParallelFor& threads, const Take& take) const {
  const Ranges ranges(count, kLeastKeysPerTask, threads);
  Scratch<int64_t> written(static_cast<size_t>(ranges.count()));
  VisitKeyType(key_type_, [&](auto k) {
    RunTasks(threads, ranges.count(), [&](int64_t r) {
      written[static_cast<size_t>(r)] = CopyPickedRange<decltype(k)>(
          picks + ranges.begin(r), ranges.end(r) - ranges.begin(r), ranges.begin(r), out, take);
    });
  });
  // Rows that were not taken leave gaps.
  int64_t total = written[0];
  const int64_t element_bytes = SizeOf(value_type_);
  const auto move_down = [&](void* column, int64_t bytes, int64_t from, int64_t rows) {
    if (column == nullptr) return;
    char* const base = static_cast<char*>(column);
    std::memmove(base + total * bytes, base + from * bytes, static_cast<size_t>(rows * bytes));
  };
  for (int64_t r = 1; r < ranges.count(); ++r) {
    const int64_t from = ranges.begin(r);
    const int64_t rows = written[static_cast<size_t>(r)];
    if (from != total) {
      move_down(out.keys, SizeOf(key_type_), from, rows);
      move_down(out.freqs, 4, from, rows);
      move_down(out.versions, 4, from, rows);
      move_down(out.scores, 8, from, rows);
      move_down(out.orders, 8, from, rows);
      for (const ColumnOut& column : out.columns) {
        move_down(column.data, column.width * element_bytes, from, rows);
      }
    }
    total += rows;
  }
  return total;
}

}  // namespace kvtable
