// A readers-writer lock of four bytes that prefers writers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace kvtable {

// Any number of readers or one writer. A waiting writer keeps new readers out, so that a stream of lookups
// never starves an update. Waiters spin briefly, then yield, then sleep, so that a preempted holder gets its
// CPU back. Not reentrant: a thread that holds it, shared or exclusive, must not take it again.
class RwSpinlock {
 public:
  RwSpinlock() = default;
  RwSpinlock(const RwSpinlock&) = delete;
  RwSpinlock& operator=(const RwSpinlock&) = delete;

  void lock_shared() {
    for (Backoff backoff;; backoff.Wait()) {
      uint32_t state = state_.load(std::memory_order_relaxed);
      if ((state & (kWriter | kWriterWaits)) == 0 &&
          state_.compare_exchange_weak(state, state + kReader, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return;
      }
    }
  }

  void unlock_shared() { state_.fetch_sub(kReader, std::memory_order_release); }

  void lock() {
    for (Backoff backoff;; backoff.Wait()) {
      uint32_t state = state_.load(std::memory_order_relaxed);
      if ((state & ~kWriterWaits) == 0) {
        // Taking the lock drops the waiting mark; another waiting writer sets it again.
        if (state_.compare_exchange_weak(state, kWriter, std::memory_order_acquire,
                                         std::memory_order_relaxed)) {
          return;
        }
      } else if ((state & kWriterWaits) == 0) {
        state_.fetch_or(kWriterWaits, std::memory_order_relaxed);
      }
    }
  }

  void unlock() { state_.fetch_and(~kWriter, std::memory_order_release); }

 private:
  class Backoff {
   public:
    void Wait() {
      ++rounds_;
      if (rounds_ <= kSpins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      } else if (rounds_ <= kSpins + kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }

   private:
    static constexpr int kSpins = 64;
    static constexpr int kYields = 64;
    int rounds_ = 0;
  };

  static constexpr uint32_t kWriter = 1;
  static constexpr uint32_t kWriterWaits = 2;
  static constexpr uint32_t kReader = 4;  // one reader; the count is in the bits from here up

  std::atomic<uint32_t> state_{0};
};

}  // namespace kvtable
