// Waiting for what another thread is about to do.
#pragma once

#include <chrono>
#include <thread>

namespace kvtable {

// Waits ever more patiently: it spins briefly, then yields, then sleeps, so that a preempted holder of what it waits for
// gets its CPU back.
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
  // For a millisecond or two, at least.
  bool has_waited_long() const { return rounds_ > kSpins + kYields + kSleeps; }

 private:
  static constexpr int kSpins = 64;
  static constexpr int kYields = 256;
  static constexpr int kSleeps = 16;
  int rounds_ = 0;
};

}  // namespace kvtable
