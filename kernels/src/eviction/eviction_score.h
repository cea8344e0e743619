// The score of a row of a bounded table, after a touch or an import; see kvtable/eviction.h. One source for
// CPU and GPU.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/host_device.h"
#include "kvtable/eviction.h"

namespace kvtable {

inline constexpr uint64_t kMicroseconds = 1000000;  // of a second

// The system's, for tables that were given no clock.
inline uint64_t SystemMicroseconds() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since_1970).count());
}

// The time of the next batch: later than the last one, until the numbers end. (An import may bring any; from
// then on it is the order of the touches that counts.)
KVTABLE_HOST_DEVICE inline constexpr uint64_t NextTime(uint64_t last, uint64_t now) {
  const uint64_t next = last == UINT64_MAX ? last : last + 1;
  return next > now ? next : now;
}

inline const char* NameInMessages(Eviction eviction) {
  switch (eviction) {
    case Eviction::kLru:
      return "LRU";
    case Eviction::kLfu:
      return "LFU";
    case Eviction::kCustom:
      return "custom";
    case Eviction::kEpochLru:
      return "epoch LRU";
    case Eviction::kEpochLfu:
      return "epoch LFU";
  }
  return "";
}

KVTABLE_HOST_DEVICE inline constexpr bool HasEpochs(Eviction eviction) {
  return eviction == Eviction::kEpochLru || eviction == Eviction::kEpochLfu;
}

KVTABLE_HOST_DEVICE inline constexpr bool HasCounts(Eviction eviction) {
  return eviction == Eviction::kLfu || eviction == Eviction::kEpochLfu;
}

// Where the count is in a score that has one.
KVTABLE_HOST_DEVICE inline constexpr int CountShift(Eviction eviction) {
  return eviction == Eviction::kLfu ? 32 : 0;
}

KVTABLE_HOST_DEVICE inline constexpr uint32_t CountOf(Eviction eviction, uint64_t score) {
  return static_cast<uint32_t>(score >> CountShift(eviction));
}

// The score of a row touched at this time. Not for kCustom.
KVTABLE_HOST_DEVICE inline constexpr uint64_t TouchedScore(Eviction eviction, uint32_t count,
                                                           uint64_t microseconds, uint32_t epoch) {
  const uint64_t high = static_cast<uint64_t>(eviction == Eviction::kLfu ? count : epoch) << 32;
  if (eviction == Eviction::kLru) return microseconds;
  if (eviction == Eviction::kEpochLfu) return high | count;
  const uint64_t seconds = microseconds / kMicroseconds;  // rows may say that it is later than it ever is
  return high | (seconds < UINT32_MAX ? seconds : UINT32_MAX);
}

// What is known of the time of a row's last touch, in microseconds since 1970: a table's clock goes on from the latest.
KVTABLE_HOST_DEVICE inline constexpr uint64_t TimeOf(Eviction eviction, uint64_t score) {
  if (eviction == Eviction::kLru) return score;
  const bool has_seconds = eviction == Eviction::kLfu || eviction == Eviction::kEpochLru;
  return has_seconds ? static_cast<uint32_t>(score) * kMicroseconds : 0;
}

// The score of a row imported without one: of its stamps, the version being its last touch in seconds.
KVTABLE_HOST_DEVICE inline constexpr uint64_t ImportedScore(Eviction eviction, uint32_t frequency,
                                                            uint32_t version, uint32_t epoch) {
  return TouchedScore(eviction, frequency, version * kMicroseconds, epoch);
}

}  // namespace kvtable
