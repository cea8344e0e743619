// The seconds that rows age by: they never go back.
#pragma once

#include <time.h>

#include <cstdint>
#include <mutex>

#include "eviction/eviction_score.h"
#include "kvtable/eviction.h"

namespace kvtable {

// The system's time when the process first asked, plus what has passed since: setting the clock changes
// nothing.
inline uint64_t SteadyMicroseconds() {
  const auto passed = [] {
    timespec now;
    ::clock_gettime(CLOCK_BOOTTIME, &now);  // counts while the machine sleeps, too
    return static_cast<uint64_t>(now.tv_sec) * kMicroseconds + static_cast<uint64_t>(now.tv_nsec) / 1000;
  };
  static const uint64_t before = SystemMicroseconds() - passed();
  return before + passed();
}

class TableClock {
 public:
  explicit TableClock(const EvictionClock& clock)
      : clock_(clock ? clock : SteadyMicroseconds), last_(clock_()), time_(last_) {}

  // What the clock went forward counts, what it went back does not: so a row's age is never more than the
  // clock has gone on, and goes on as soon as the clock does.
  uint32_t Seconds() const {
    std::lock_guard<std::mutex> hold(mutex_);
    const uint64_t now = clock_();
    if (now > last_) time_ += now - last_;
    last_ = now;
    return static_cast<uint32_t>(time_ / kMicroseconds);
  }

 private:
  const EvictionClock clock_;
  mutable std::mutex mutex_;
  mutable uint64_t last_;  // what the clock said
  mutable uint64_t time_;
};

}  // namespace kvtable
