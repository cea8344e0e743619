// The policies of a table, a slice after each update: all of them come round about once in `expire_every`
// updates, or less often where that would hold training up, but often enough for the rows that come.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/expiry.h"
#include "kvtable/table.h"

namespace kvtools {

class BackgroundExpiry {
 public:
  // The share of the time between the ends of two updates that a slice may take, beside what new rows make it look at. What
  // it takes more, because a few rows are looked at at a time, is taken off the next ones.
  static constexpr double kShare = 0.02;

  BackgroundExpiry(std::vector<kvtable::EvictPolicy> policies, int64_t every)
      : policies_(std::move(policies)), every_(every), sweep_(policies_) {}

  // After an update of `table`. Does nothing while another thread is in it.
  void AfterUpdate(const std::shared_ptr<kvtable::Table>& table, bool on_gpu, kvtable::ParallelFor& threads);

 private:
  using Clock = std::chrono::steady_clock;

  const std::vector<kvtable::EvictPolicy> policies_;
  const int64_t every_;
  std::mutex mutex_;  // guards all below
  std::weak_ptr<kvtable::Table> table_;
  kvtable::Sweep sweep_;
  int64_t last_size_ = 0;  // rows when the last slice ended
  Clock::time_point last_end_;
  Clock::duration debt_{0};
};

}  // namespace kvtools
