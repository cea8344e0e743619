#pragma once

#include <cstdint>

namespace kvtable {

// How much is drawn and listed. It decides how long an eviction takes, and never which rows go: tests have
// others.
struct EvictionTuning {
  static constexpr uint32_t kMostSamples = 2048;

  int64_t rows_per_sample = 16;  // until there are most_samples
  int64_t most_samples = kMostSamples;
  uint64_t least_below_bound = 4;  // samples: with fewer, luck would say how many rows there are
  uint64_t batches_listed = 4;     // a new list has rows for at least so many
  int64_t most_close = 1 << 16;    // see VictimRows
};

}  // namespace kvtable
