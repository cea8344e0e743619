#include "expiry.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "background_expiry.h"

namespace kvtools {
namespace {

// The passes over the table that a round of a sweep takes at most.
int64_t PassesOf(const std::vector<kvtable::EvictPolicy>& policies) {
  int64_t tests = 0;
  int64_t top = 0;
  for (const kvtable::EvictPolicy& policy : policies) {
    if (policy.kind == kvtable::EvictPolicy::Kind::kKeepTop) {
      top = kvtable::RankDigit::kDigits + 1;  // one to count each digit, and the one that removes
    } else {
      tests = 1;
    }
  }
  return tests + top;
}

}  // namespace

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
    last_size_ = table->Size();
    last_end_ = begin;
    debt_ = Clock::duration(0);
    return;
  }
  // In every_ updates a whole round, not a pass: the rows that a KeepTop lets go wait for its last one.
  const int64_t length = std::max<int64_t>(1, table->PassLength());
  const double of_round = static_cast<double>(PassesOf(policies_)) / static_cast<double>(every_);
  int64_t rows =
      std::max<int64_t>(1, static_cast<int64_t>(std::ceil(static_cast<double>(length) * of_round)));
  if (on_gpu) {  // where a slice is one launch
    for (; rows > 0; rows -= length) sweep_.Run(table.get(), std::min(rows, length), threads);
    return;
  }
  // However long that takes, two for each row that is new, in each pass: then about half of a table at most is rows that wait
  // to go, and it does not grow for as long as keys come and go.
  const int64_t born = std::max<int64_t>(0, table->Size() - last_size_);
  for (int64_t due = std::min(rows, 2 * born * PassesOf(policies_)); due > 0; due -= length, rows -= length) {
    sweep_.Run(table.get(), std::min(due, length), threads);
  }
  const Clock::time_point rest = Clock::now();
  const auto granted = std::chrono::duration_cast<Clock::duration>((begin - last_end_) * kShare) - debt_;
  Clock::time_point now = rest;
  // A slice ends with its pass: of a small table it is counted as what there was.
  for (; rows > 0 && now - rest < granted; rows -= std::min(length, kRowsAtATime), now = Clock::now()) {
    sweep_.Run(table.get(), std::min(rows, kRowsAtATime), threads);
  }
  debt_ = std::max(Clock::duration(0), (now - rest) - granted);
  last_size_ = table->Size();
  last_end_ = now;
}

}  // namespace kvtools
