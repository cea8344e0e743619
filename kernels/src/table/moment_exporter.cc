#include "table/moment_exporter.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <utility>

#include "table/copy_picks.h"

namespace kvtable {

MomentExporter::MomentExporter(ShardedTable* table, std::shared_ptr<Moment> moment,
                               std::shared_ptr<const std::vector<std::unique_ptr<ShardMoment>>> shards,
                               uint64_t version)
    : table_(table),
      moment_(std::move(moment)),
      hold_shards_(std::move(shards)),
      shards_(*hold_shards_),
      version_(version) {
  for (const auto& shard : shards_) {
    int64_t changed = 0;
    const auto& versions = shard->changes();
    for (size_t v = 0; v < versions.size(); ++v) {
      const ShardChanges& changes = *versions[v];
      changed += changes.changed.count();
      for (size_t i = 0; i < changes.removed.size(); ++i) {
        const bool came_since =
            std::any_of(versions.begin(), versions.begin() + static_cast<ptrdiff_t>(v),
                        [&](const auto& u) { return u->born.Has(changes.removed_rows[i]); });
        if (!came_since) removed_.push_back(changes.removed[i]);
      }
    }
    left_ += shard->all() ? shard->end() : std::min<int64_t>(changed, shard->end());
  }
  std::sort(removed_.begin(), removed_.end());
  removed_.erase(std::unique(removed_.begin(), removed_.end()), removed_.end());
  is_back_.resize(removed_.size());
}

MomentExporter::~MomentExporter() {
  moment_->ended.store(true);
  table_->Unwatch(shards_);
  table_->gate_.Leave(moment_.get());
}

int64_t MomentExporter::max_rows() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return left_;
}

int64_t MomentExporter::born_rows() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return born_;
}

int64_t MomentExporter::removed_rows() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return static_cast<int64_t>(removed_.size()) - back_;
}

void MomentExporter::RemovedKeys(void* keys) const {
  std::lock_guard<std::mutex> hold(mutex_);
  VisitKeyType(table_->key_type_, [&](auto k) {
    using Key = decltype(k);
    Key* to = static_cast<Key*>(keys);
    for (size_t i = 0; i < removed_.size(); ++i) {
      if (!is_back_[i]) *to++ = static_cast<Key>(removed_[i]);
    }
  });
}

void MomentExporter::PickAside(int64_t capacity, Picks* picks) {
  if (blocks_.empty()) {
    for (size_t s = 0; s < shards_.size(); ++s) {
      Shard& shard = *table_->shards_[s];
      {
        std::shared_lock<ShardLock> hold(shard.lock);
        if (!shards_[s]->has_aside()) continue;
      }
      std::deque<std::unique_ptr<AsideBlock>> taken;
      {
        std::lock_guard<ShardLock> hold(shard.lock);
        taken = shards_[s]->TakeAside();
      }
      for (auto& block : taken) blocks_.push_back(std::move(block));
    }
  }
  while (!blocks_.empty() && static_cast<int64_t>(picks->aside.size()) < capacity) {
    const std::shared_ptr<const AsideBlock>& block = blocks_.front();
    picks->blocks.push_back(block);
    while (block_row_ < block->count() && static_cast<int64_t>(picks->aside.size()) < capacity) {
      picks->aside.push_back(block->Row(block_row_++));
    }
    if (block_row_ < block->count()) return;
    blocks_.pop_front();
    block_row_ = 0;
  }
}

MomentExporter::Picks MomentExporter::Pick(int64_t capacity) {
  Picks picks;
  PickAside(capacity, &picks);
  if (!picks.aside.empty()) return picks;
  while (static_cast<int64_t>(picks.rows.size()) < capacity && shard_ < shards_.size()) {
    const Shard& shard = *table_->shards_[shard_];
    const ShardMoment& moment = *shards_[shard_];
    std::shared_lock<ShardLock> hold(shard.lock);
    row_ = moment.ForEach(shard.rows, row_, [&](uint32_t row) {
      if (static_cast<int64_t>(picks.rows.size()) == capacity) return false;
      picks.rows.push_back(uint64_t{shard_} << 32 | row);
      return true;
    });
    if (row_ < moment.end()) break;
    ++shard_;
    row_ = 0;
  }
  // What was still in the table a moment ago may have been put aside before it was picked.
  if (picks.rows.empty()) PickAside(capacity, &picks);
  return picks;
}

int64_t MomentExporter::Next(int64_t capacity, const Buffers& out, ParallelFor& threads) {
  for (;;) {
    moment_->memory->NoteProgress();
    Picks picks;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      capacity = std::min(capacity, left_);
      if (capacity > 0) picks = Pick(capacity);
      if (picks.rows.empty() && picks.aside.empty()) {
        if (in_flight_ == 0) moment_->ended.store(true);
        table_->CheckNotGivenUp(*moment_);
        return 0;
      }
      ++in_flight_;
    }
    int64_t copied = static_cast<int64_t>(picks.aside.size());
    try {
      if (copied > 0) {
        CopyAside(picks.aside, out);
        picks.blocks.clear();
      } else {
        copied = CopyRows(picks.rows, out, threads);
      }
    } catch (...) {  // what was picked will not come again
      moment_->given_up.store(true);
      std::lock_guard<std::mutex> hold(mutex_);
      --in_flight_;
      throw;
    }
    std::lock_guard<std::mutex> hold(mutex_);
    --in_flight_;
    left_ -= copied;
    table_->CheckNotGivenUp(*moment_);
    moment_->memory->NoteProgress();
    if (copied > 0) return copied;  // else all that were picked have been put aside
  }
}

int64_t MomentExporter::CopyRows(const std::vector<uint64_t>& rows, const Buffers& out,
                                 ParallelFor& threads) {
  std::vector<uint64_t> born;
  std::mutex born_mutex;
  // So that rows and ranks are of one moment.
  const auto batches = table_->HoldBatches(out.scores != nullptr || out.orders != nullptr);
  const int64_t copied = table_->CopyPicked(
      rows.data(), static_cast<int64_t>(rows.size()), out, threads, [&](uint64_t shard, uint32_t row) {
        ShardMoment& moment = *shards_[shard];
        if (!moment.Wants(row) || moment_->given_up.load(std::memory_order_relaxed)) return false;
        moment.Take(row);
        if (!moment.all() && moment.Born(row)) {
          std::lock_guard<std::mutex> hold(born_mutex);
          born.push_back(table_->shards_[shard]->rows.StampOf(row)->key);
        }
        return true;
      });
  NoteBorn(born);
  return copied;
}

void MomentExporter::CopyAside(const std::vector<const AsideRow*>& rows, const Buffers& out) {
  VisitKeyType(table_->key_type_, [&](auto k) { CopyAsideOf<decltype(k)>(rows, out); });
  std::vector<uint64_t> born;
  for (const AsideRow* row : rows) {
    if (row->born != 0) born.push_back(row->stamp.key);
  }
  NoteBorn(born);
}

template <class Key>
void MomentExporter::CopyAsideOf(const std::vector<const AsideRow*>& rows, const Buffers& out) const {
  const std::shared_ptr<const RowLayout> layout = table_->layout();  // has not changed since the moment
  std::vector<RowLayout::Column> columns;
  for (const ColumnOut& column : out.columns) {
    columns.push_back(layout->At(column.column, column.width, column.generation));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const AsideRow& row = *rows[i];
    if (out.keys != nullptr) static_cast<Key*>(out.keys)[i] = static_cast<Key>(row.stamp.key);
    if (out.freqs != nullptr) out.freqs[i] = row.stamp.frequency;
    if (out.versions != nullptr) out.versions[i] = row.stamp.version;
    if (out.scores != nullptr) out.scores[i] = row.rank.score;
    if (out.orders != nullptr) out.orders[i] = row.rank.order;
    for (size_t c = 0; c < columns.size(); ++c) {
      std::memcpy(static_cast<char*>(out.columns[c].data) + static_cast<int64_t>(i) * columns[c].bytes,
                  AsideBlock::Bytes(&row) + columns[c].offset, static_cast<size_t>(columns[c].bytes));
    }
  }
}

void MomentExporter::NoteBorn(const std::vector<uint64_t>& keys) {
  if (keys.empty()) return;
  std::lock_guard<std::mutex> hold(mutex_);
  born_ += static_cast<int64_t>(keys.size());
  for (const uint64_t key : keys) {
    const auto at = std::lower_bound(removed_.begin(), removed_.end(), key);
    if (at == removed_.end() || *at != key) continue;
    is_back_[static_cast<size_t>(at - removed_.begin())] = true;
    ++back_;
  }
}

}  // namespace kvtable
