// A readers-writer lock of eight bytes that prefers who waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "threads/backoff.h"

namespace kvtable {

// Any number of readers or one writer. A waiting writer keeps new readers out, so that a stream of lookups never
// starves an update; and when a writer lets go, as many readers as were waiting have their turn before the next writer,
// so that a stream of updates never starves a lookup. A writer that has waited long takes the lock whosever turn it
// is: those who waited may not have a CPU. Not reentrant: a thread that holds it, shared or exclusive, must not
// take it again.
class RwSpinlock {
 public:
  RwSpinlock() = default;
  RwSpinlock(const RwSpinlock&) = delete;
  RwSpinlock& operator=(const RwSpinlock&) = delete;

  bool try_lock_shared() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    while ((state & (kWriter | kWriterWaits)) == 0) {
      if (state_.compare_exchange_weak(state, state + kReader, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  void lock_shared() {
    if (try_lock_shared()) return;
    state_.fetch_add(kWaiting, std::memory_order_relaxed);
    for (Backoff backoff;; backoff.Wait()) {
      uint64_t state = state_.load(std::memory_order_relaxed);
      const bool has_turn = (state & kTurns) != 0;
      if ((state & kWriter) != 0 || ((state & kWriterWaits) != 0 && !has_turn)) continue;
      if (state_.compare_exchange_weak(state, state + kReader - kWaiting - (has_turn ? kTurn : 0),
                                       std::memory_order_acquire, std::memory_order_relaxed)) {
        return;
      }
    }
  }

  void unlock_shared() { state_.fetch_sub(kReader, std::memory_order_release); }

  bool try_lock() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    return (state & (kWriter | kReaders | kTurns)) == 0 && TakeFrom(state);
  }

  void lock() {
    for (Backoff backoff;; backoff.Wait()) {
      const uint64_t state = state_.load(std::memory_order_relaxed);
      const uint64_t others = kWriter | kReaders | (backoff.has_waited_long() ? 0 : kTurns);
      if ((state & others) == 0) {
        if (TakeFrom(state)) return;
      } else if ((state & kWriterWaits) == 0) {
        state_.fetch_or(kWriterWaits, std::memory_order_relaxed);
      }
    }
  }

  void unlock() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    while (!state_.compare_exchange_weak(state, (state & ~kWriter) + (state & kWaitings) / kWaiting * kTurn,
                                         std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  // Whether a writer has it, or waits for it: it is no more than a hint.
  bool is_wanted() const { return (state_.load(std::memory_order_relaxed) & (kWriter | kWriterWaits)) != 0; }
  // Whether readers wait: for a writer that may as well go on later.
  bool readers_wait() const { return (state_.load(std::memory_order_relaxed) & kWaitings) != 0; }

 private:
  // For a writer: drops the waiting mark, which another waiting writer sets again, and turns that were not taken.
  bool TakeFrom(uint64_t state) {
    return state_.compare_exchange_weak(state, (state & kWaitings) | kWriter, std::memory_order_acquire,
                                        std::memory_order_relaxed);
  }

  static constexpr uint64_t kWriter = 1;
  static constexpr uint64_t kWriterWaits = 2;
  // Counts of threads, 20 bits each.
  static constexpr uint64_t kReader = uint64_t{1} << 4;    // those that have it
  static constexpr uint64_t kWaiting = uint64_t{1} << 24;  // readers that wait
  static constexpr uint64_t kTurn = uint64_t{1} << 44;     // of them, those that go before the next writer
  static constexpr uint64_t kReaders = kWaiting - kReader;
  static constexpr uint64_t kWaitings = kTurn - kWaiting;
  static constexpr uint64_t kTurns = ~uint64_t{0} - kTurn + 1;

  std::atomic<uint64_t> state_{0};
};

}  // namespace kvtable
