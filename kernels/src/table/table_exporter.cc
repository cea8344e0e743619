// Picks of live rows, and their copies.
#include "table/table_exporter.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "memory/scratch.h"
#include "table/read_range.h"
#include "threads/run_tasks.h"

namespace kvtable {

TableExporter::RowsOfShard::RowsOfShard(Shard* shard) : shard_(shard) {
  std::lock_guard<RwSpinlock> hold(shard->lock);
  reused_ = std::make_unique<ReusedRows>(shard->rows.high_water());
  shard->rows.Watch(reused_.get());
}

TableExporter::RowsOfShard::~RowsOfShard() {
  std::lock_guard<RwSpinlock> hold(shard_->lock);
  shard_->rows.Unwatch(reused_.get());
}

TableExporter::TableExporter(const ShardedTable* table) : table_(table) {
  for (const auto& shard : table->shards_) rows_.push_back(std::make_unique<RowsOfShard>(shard.get()));
}

int64_t TableExporter::max_rows() const {
  int64_t rows = 0;
  for (size_t s = static_cast<size_t>(shard_); s < rows_.size(); ++s) rows += rows_[s]->end();
  return rows - row_;
}

// Picks up to `capacity` live rows, then copies them out in parallel. A row may be removed in between, which
// leaves a gap that is closed at the end.
int64_t TableExporter::Next(int64_t capacity, const Buffers& out, ParallelFor& threads) {
  capacity = std::min(capacity, max_rows());
  if (capacity <= 0) return 0;
  for (;;) {
    Scratch<uint64_t> picks(static_cast<size_t>(capacity));  // shard << 32 | row
    int64_t count = 0;
    while (count < capacity && shard_ < static_cast<int>(rows_.size())) {
      const Shard& shard = *table_->shards_[static_cast<size_t>(shard_)];
      {
        std::shared_lock<RwSpinlock> hold(shard.lock);
        const RowsOfShard& rows = *rows_[static_cast<size_t>(shard_)];
        const uint32_t end = std::min(rows.end(), shard.rows.high_water());
        const uint64_t high = static_cast<uint64_t>(shard_) << 32;
        if (row_ < end) {
          row_ = shard.rows.ForEachLive(row_, end, [&](uint32_t row) {
            if (!rows.Has(row)) return true;
            if (count == capacity) return false;
            picks[static_cast<size_t>(count++)] = high | row;
            return true;
          });
        }
        if (row_ < end) break;
      }
      ++shard_;
      row_ = 0;
    }
    if (count == 0) return 0;
    const Ranges ranges(count, kLeastKeysPerTask, threads);
    Scratch<int64_t> written(static_cast<size_t>(ranges.count()));
    VisitKeyType(table_->key_type_, [&](auto k) {
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        written[static_cast<size_t>(r)] = Write<decltype(k)>(
            picks.data() + ranges.begin(r), ranges.end(r) - ranges.begin(r), ranges.begin(r), out);
      });
    });
    int64_t total = written[0];
    const int64_t element_bytes = SizeOf(table_->value_type_);
    const auto move_down = [&](void* column, int64_t bytes, int64_t from, int64_t rows) {
      if (column == nullptr) return;
      char* const base = static_cast<char*>(column);
      std::memmove(base + total * bytes, base + from * bytes, static_cast<size_t>(rows * bytes));
    };
    for (int64_t r = 1; r < ranges.count(); ++r) {
      const int64_t from = ranges.begin(r);
      const int64_t rows = written[static_cast<size_t>(r)];
      if (from != total) {
        move_down(out.keys, SizeOf(table_->key_type_), from, rows);
        move_down(out.freqs, 4, from, rows);
        move_down(out.versions, 4, from, rows);
        for (const ColumnOut& column : out.columns) {
          move_down(column.data, column.width * element_bytes, from, rows);
        }
      }
      total += rows;
    }
    if (out.scores != nullptr) std::memset(out.scores, 0, static_cast<size_t>(total) * sizeof(uint64_t));
    if (total > 0) return total;  // else all that were picked have gone: look further
  }
}

// Writes the rows that are still there to `out` from row `at` on, and returns how many.
template <class Key>
int64_t TableExporter::Write(const uint64_t* picks, int64_t count, int64_t at, const Buffers& out) const {
  const int64_t first = at;
  for (int64_t begin = 0; begin < count;) {
    const uint64_t shard_number = picks[begin] >> 32;
    int64_t end = begin;
    while (end < count && end - begin < kBlock && picks[end] >> 32 == shard_number) ++end;
    const Shard& shard = *table_->shards_[shard_number];
    std::shared_lock<RwSpinlock> hold(shard.lock);
    std::vector<RowLayout::Column> columns;
    for (const ColumnOut& column : out.columns) columns.push_back(ShardedTable::CheckColumn(shard, column));
    for (; begin < end; ++begin) {
      const uint32_t row = static_cast<uint32_t>(picks[begin]);
      if (row >= shard.rows.high_water() || !shard.rows.IsLive(row) || !rows_[shard_number]->Has(row))
        continue;
      const RowStamp& stamp = *shard.rows.StampOf(row);
      if (out.keys != nullptr) static_cast<Key*>(out.keys)[at] = static_cast<Key>(stamp.key);
      if (out.freqs != nullptr) out.freqs[at] = stamp.frequency;
      if (out.versions != nullptr) out.versions[at] = stamp.version;
      const char* const from = shard.rows.Row(row);
      for (size_t c = 0; c < columns.size(); ++c) {
        std::memcpy(static_cast<char*>(out.columns[c].data) + at * columns[c].bytes, from + columns[c].offset,
                    static_cast<size_t>(columns[c].bytes));
      }
      ++at;
    }
  }
  return at - first;
}

std::unique_ptr<Exporter> ShardedTable::Export() const { return std::make_unique<TableExporter>(this); }

}  // namespace kvtable
