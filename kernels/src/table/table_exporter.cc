#include "table/table_exporter.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "memory/scratch.h"
#include "table/copy_picks.h"

namespace kvtable {

TableExporter::RowsOfShard::RowsOfShard(Shard* shard) : shard_(shard) {
  std::lock_guard<ShardLock> hold(shard->lock);
  reused_ = std::make_unique<ReusedRows>(shard->rows.high_water());
  shard->rows.Watch(reused_.get());
}

TableExporter::RowsOfShard::~RowsOfShard() {
  std::lock_guard<ShardLock> hold(shard_->lock);
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

// Picks up to `capacity` live rows, then copies them out in parallel. A row may be removed in between.
int64_t TableExporter::Next(int64_t capacity, const Buffers& out, ParallelFor& threads) {
  capacity = std::min(capacity, max_rows());
  if (capacity <= 0) return 0;
  // So that rows and ranks are of one moment.
  const auto batches = table_->HoldBatches(out.scores != nullptr || out.orders != nullptr);
  for (;;) {
    Scratch<uint64_t> picks(static_cast<size_t>(capacity));  // shard << 32 | row
    int64_t count = 0;
    while (count < capacity && shard_ < static_cast<int>(rows_.size())) {
      const Shard& shard = *table_->shards_[static_cast<size_t>(shard_)];
      {
        std::shared_lock<ShardLock> hold(shard.lock);
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
    const int64_t copied =
        table_->CopyPicked(picks.data(), count, out, threads,
                           [&](uint64_t shard, uint32_t row) { return rows_[shard]->Has(row); });
    if (copied > 0) return copied;  // else all that were picked have gone: look further
  }
}

std::unique_ptr<Exporter> ShardedTable::Export() const { return std::make_unique<TableExporter>(this); }

}  // namespace kvtable
