// Another row layout for a live table.
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "table/sharded_table.h"
#include "threads/run_tasks.h"

namespace kvtable {
namespace {

// What turns rows of one layout into rows of another.
ConvertRows RowConverter(std::shared_ptr<const RowLayout> from_layout,
                         std::shared_ptr<const RowLayout> to_layout) {
  const RowLayout& from = *from_layout;
  const RowLayout& to = *to_layout;
  // For each new slot the old column it continues, or -1.
  std::vector<int> source;
  for (const SlotSpec& slot : to.slots) {
    int at = -1;
    for (size_t i = 0; i < from.slots.size(); ++i) {
      if (from.slots[i].name == slot.name && from.slots[i].width == slot.width) at = static_cast<int>(i) + 1;
    }
    source.push_back(at);
  }
  return [from_layout = std::move(from_layout), to_layout = std::move(to_layout), source](
             const char* old_row, char* new_row, uint32_t rows) {
    const RowLayout& from = *from_layout;
    const RowLayout& to = *to_layout;
    for (uint32_t r = 0; r < rows; ++r, old_row += from.row_bytes, new_row += to.row_bytes) {
      std::memcpy(new_row, old_row, static_cast<size_t>(from.value_bytes));
      for (size_t i = 0; i < source.size(); ++i) {
        const RowLayout::Column& c = to.columns[i + 1];
        if (source[i] < 0) {
          to.InitializeSlot(static_cast<int>(i) + 1, new_row);
        } else {
          std::memcpy(new_row + c.offset, old_row + from.columns[static_cast<size_t>(source[i])].offset,
                      static_cast<size_t>(c.bytes));
        }
      }
    }
  };
}

}  // namespace

uint64_t ShardedTable::EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) {
  {
    const std::shared_ptr<const RowLayout> now = layout();
    if (now->slots == slots) return now->generation;
  }
  const MomentGate::Alone no_exports(&gate_, threads.may_wait());
  std::lock_guard<RwSpinlock> alone(slots_lock_);
  const std::shared_ptr<const RowLayout> from = layout();
  const auto to =
      std::make_shared<const RowLayout>(value_type_, dim_, slots, from->generation + 1, from.get());
  if (from->slots == slots) return from->generation;
  std::unique_lock<std::mutex> hold_log(changes_mutex_);
  std::vector<std::shared_ptr<ShardChanges>> logs = EmptyLogs();
  // All that may fail comes first, for all shards: from then on every shard changes.
  const ConvertRows convert = RowConverter(from, to);
  const int64_t shards = static_cast<int64_t>(shards_.size());
  const std::shared_ptr<SharedPages> row_pages = MakeRowPages();
  int64_t prepared = 0;
  try {
    for (; prepared < shards; ++prepared) {
      Shard& shard = *shards_[static_cast<size_t>(prepared)];
      std::lock_guard<ShardLock> hold(shard.lock);
      shard.rows.PrepareRelayout(to->row_bytes, convert, row_pages);
    }
  } catch (...) {
    while (prepared-- > 0) {
      Shard& shard = *shards_[static_cast<size_t>(prepared)];
      std::lock_guard<ShardLock> hold(shard.lock);
      shard.rows.CancelRelayout();
    }
    throw;
  }
  const auto change = [&](int64_t s) {
    Shard& shard = *shards_[static_cast<size_t>(s)];
    std::lock_guard<ShardLock> hold(shard.lock);
    if (shard.layout == to) return;
    shard.rows.Relayout(convert);
    shard.layout = to;
    StartLogAnew(&shard, std::move(logs[static_cast<size_t>(s)]));
  };
  try {
    RunTasks(threads, shards, change);
  } catch (...) {  // the threads could not be had; see to what they left
    for (int64_t s = 0; s < shards; ++s) change(s);
  }
  ForgetAllChanges(ChangeLog::Why::kSlots);
  hold_log.unlock();
  std::lock_guard<std::mutex> hold(state_mutex_);
  layout_ = to;
  row_pages_ = row_pages;
  generation_.store(to->generation, std::memory_order_release);
  return to->generation;
}

}  // namespace kvtable
