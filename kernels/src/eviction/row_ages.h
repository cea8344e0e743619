// When the rows of a table expire, and what they are stamped with.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "eviction/table_clock.h"
#include "kvtable/expiry.h"
#include "kvtable/table.h"

namespace kvtable {

// One moment, for a batch to go by.
struct BatchTime {
  uint32_t now = 0;             // as versions have it
  uint32_t expired_before = 0;  // a row with a version below this is not there

  bool HasExpired(uint32_t version) const { return version < expired_before; }
};

class RowAges {
 public:
  explicit RowAges(const Expiry& expiry) : expiry_(expiry), clock_(expiry.clock) {}

  const Expiry& expiry() const { return expiry_; }

  bool in_steps() const { return expiry_.ages() && expiry_.unit == AgeUnit::kSteps; }

  uint32_t Now() const {
    if (in_steps()) return step_.load(std::memory_order_relaxed);
    if (expiry_.ages()) return clock_.Seconds();
    // Versions are what callers say, and go by the system's clock.
    return static_cast<uint32_t>((expiry_.clock ? expiry_.clock() : SystemMicroseconds()) / kMicroseconds);
  }

  // Versions below this are of that age, or older.
  static uint32_t WrittenBefore(uint32_t now, uint32_t age) { return now >= age ? now - age + 1 : 0; }

  BatchTime Begin() const {
    if (!expiry_.ages()) return {};
    const uint32_t now = Now();
    return {now, WrittenBefore(now, expiry_.max_age)};
  }

  // What rows written at this moment are stamped with.
  Stamp StampAt(const BatchTime& time, Stamp stamp) const {
    if (expiry_.ages()) stamp.version = time.now + (stamp.ends_step && in_steps() ? 1 : 0);
    return stamp;
  }

  // What an imported row is stamped with: of one from the future the age begins now.
  uint32_t VersionAt(const BatchTime& time, const uint32_t* versions, int64_t i) const {
    if (!expiry_.ages()) return versions == nullptr ? 0 : versions[i];
    return versions == nullptr ? time.now : std::min(versions[i], time.now);
  }

  // After a write has been stamped.
  void End(const Stamp& stamp) {
    if (stamp.ends_step && in_steps()) step_.fetch_add(1, std::memory_order_relaxed);
  }

  void SetStep(uint32_t step) {
    if (!in_steps()) {
      throw Error(
          ErrorCode::kFailedPrecondition,
          "The table counts no steps: its rows do not expire by steps. Make it with an age in steps.");
    }
    uint32_t before = step_.load(std::memory_order_relaxed);
    do {
      if (step < before) {
        throw Error(ErrorCode::kInvalidArgument, "Step " + std::to_string(step) + " is before step " +
                                                     std::to_string(before) +
                                                     ", at which the table is: steps do not go back.");
      }
    } while (!step_.compare_exchange_weak(before, step, std::memory_order_relaxed));
  }

 private:
  const Expiry expiry_;
  const TableClock clock_;
  std::atomic<uint32_t> step_{0};
};

}  // namespace kvtable
