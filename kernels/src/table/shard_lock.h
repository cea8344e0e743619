// The readers-writer lock of one shard of a table.
#pragma once

#include <atomic>
#include <cstdint>

#include "table/read_seats.h"
#include "table/rw_spinlock.h"

namespace kvtable {

// Who reads one shard counts itself in `own_`; who reads many takes a seat. A writer has `own_` first, and then waits
// for the seats.
class ShardLock {
 public:
  ShardLock(ReadSeats* seats, int shard) : seats_(seats), bit_(uint64_t{1} << shard) {}

  void lock() {
    if (!own_.try_lock()) {
      waits_.fetch_add(1, std::memory_order_relaxed);
      own_.lock();
    }
    if (seats_->Keep(bit_)) waits_.fetch_add(1, std::memory_order_relaxed);
  }
  void unlock() {
    seats_->LetGo(bit_);
    own_.unlock();
  }
  bool try_lock_shared() { return own_.try_lock_shared(); }
  void lock_shared() {
    if (own_.try_lock_shared()) return;
    waits_.fetch_add(1, std::memory_order_relaxed);
    own_.lock_shared();
  }
  void unlock_shared() { own_.unlock_shared(); }

  bool is_wanted() const { return own_.is_wanted(); }
  bool readers_wait() const { return own_.readers_wait(); }
  // How often somebody did not get it at once. A wait is counted when it begins, but a writer's wait for seats when it
  // ends.
  int64_t waits() const { return waits_.load(std::memory_order_relaxed); }

 private:
  RwSpinlock own_;
  ReadSeats* const seats_;
  const uint64_t bit_;
  std::atomic<int64_t> waits_{0};
};

}  // namespace kvtable
