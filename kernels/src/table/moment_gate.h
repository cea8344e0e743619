// The exports of one moment that are open on a table, and who may not work beside them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/parallel_for.h"
#include "table/shard_moment.h"

namespace kvtable {

// Exports enter and leave. Who changes all rows at once (Clear, a change of slots) goes Alone: it waits until
// those that are in have left or are given up, and others wait outside meanwhile. Its mutex is a leaf.
class MomentGate {
 public:
  void Enter(std::shared_ptr<Moment> moment) {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return alone_ == 0; });
    open_.push_back(std::move(moment));
    count_.store(static_cast<int>(open_.size()), std::memory_order_relaxed);
  }

  void Leave(const Moment* moment) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (size_t i = 0; i < open_.size(); ++i) {
      if (open_[i].get() != moment) continue;
      open_.erase(open_.begin() + static_cast<ptrdiff_t>(i));
      break;
    }
    count_.store(static_cast<int>(open_.size()), std::memory_order_relaxed);
    changed_.notify_all();
  }

  // Before a batch changes rows: waits until there is room to put them aside. Without any lock in hand that
  // an export takes.
  void AwaitRoom() {
    if (count_.load(std::memory_order_relaxed) == 0) return;
    std::vector<std::shared_ptr<Moment>> open;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      open = open_;
    }
    for (const std::shared_ptr<Moment>& moment : open) {
      while (!moment->over() && moment->memory->IsFull()) {
        if (!moment->memory->AwaitRoom()) moment->given_up.store(true);
      }
    }
  }

  class Alone {
   public:
    // Throws MustWait where there is something to wait for and the caller may not.
    explicit Alone(MomentGate* gate, bool may_wait = true) : gate_(gate) {
      std::unique_lock<std::mutex> hold(gate_->mutex_);
      if (!may_wait && !gate_->AllOver()) throw MustWait();
      ++gate_->alone_;
      while (!gate_->AllOver()) {
        gate_->changed_.wait_for(hold, std::chrono::milliseconds(100));
        for (const std::shared_ptr<Moment>& moment : gate_->open_) {
          if (moment->memory->IsStuck()) moment->given_up.store(true);
        }
      }
    }
    ~Alone() {
      std::lock_guard<std::mutex> hold(gate_->mutex_);
      --gate_->alone_;
      gate_->changed_.notify_all();
    }
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    MomentGate* const gate_;
  };

 private:
  bool AllOver() const {
    for (const std::shared_ptr<Moment>& moment : open_) {
      if (!moment->over()) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Moment>> open_;
  int alone_ = 0;
  std::atomic<int> count_{0};
};

}  // namespace kvtable
