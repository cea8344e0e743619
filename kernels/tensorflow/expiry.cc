#include "expiry.h"

#include <algorithm>

#include "background_expiry.h"

namespace kvtools {

void ExpireBeforeSave(const TableConfig& config, kvtable::Table* table, kvtable::ParallelFor& threads) {
  kvtable::EvictExpired(table, threads);
  if (!config.policies.expire_on_save || config.read_only) return;
  for (const kvtable::EvictPolicy& policy : config.policies.expiry) kvtable::Evict(table, policy, threads);
}

void BackgroundExpiry::AfterUpdate(const std::shared_ptr<kvtable::Table>& table, bool on_gpu,
                                   kvtable::ParallelFor& threads) {
  constexpr int64_t kRowsAtATime = 128;
  const std::unique_lock<std::mutex> alone(mutex_, std::try_to_lock);
  if (!alone.owns_lock()) return;
  const Clock::time_point begin = Clock::now();
  if (table_.lock() != table) {  // the first update, or the first of a table that came in its place
    table_ = table;
    sweep_ = kvtable::Sweep(policies_);
    last_end_ = begin;
    debt_ = Clock::duration(0);
    return;
  }
  int64_t rows = (table->PassLength() + every_ - 1) / every_;
  if (on_gpu) {  // where a slice is one launch
    sweep_.Run(table.get(), std::max<int64_t>(1, rows), threads);
    return;
  }
  const auto granted = std::chrono::duration_cast<Clock::duration>((begin - last_end_) * kShare) - debt_;
  Clock::time_point now = begin;
  for (; rows > 0 && now - begin < granted; rows -= kRowsAtATime, now = Clock::now()) {
    sweep_.Run(table.get(), std::min(rows, kRowsAtATime), threads);
  }
  debt_ = std::max(Clock::duration(0), (now - begin) - granted);
  last_end_ = now;
}

}  // namespace kvtools
