// Which ids each bag of a pooled lookup has, as kernels read it: safe whatever the splits hold.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/host_device.h"

namespace kvtable {

// What was wrong first, in one word: nothing is 0, and what lies earlier in its array stands above what lies
// later.
struct BagMistake {
  enum Kind : uint64_t { kSplits = 1, kRowIds = 2 };
  static constexpr uint64_t kLast = (uint64_t{1} << 62) - 1;

  KVTABLE_HOST_DEVICE static void Note(uint64_t* word, Kind kind, uint64_t at) {
    RaiseTo(word, (kLast - at) << 2 | kind);
  }
  static Kind KindOf(uint64_t word) { return static_cast<Kind>(word & 3); }
  static uint64_t PlaceOf(uint64_t word) { return kLast - (word >> 2); }
};

struct BagSplits {
  const int64_t* splits;  // (bags + 1)
  uint64_t bags;
  int64_t ids;
  uint64_t* mistake;

  // Within [0, ids], whatever the splits say.
  KVTABLE_HOST_DEVICE int64_t Begin(uint64_t bag) const { return Clamped(splits[bag], 0); }
  KVTABLE_HOST_DEVICE int64_t End(uint64_t bag) const { return Clamped(splits[bag + 1], Begin(bag)); }

  // Notes whether the splits around this bag do not rise from 0 to the number of ids.
  KVTABLE_HOST_DEVICE void Check(uint64_t bag) const {
    const int64_t begin = splits[bag];
    const int64_t end = splits[bag + 1];
    const bool starts = bag > 0 || begin == 0;
    const bool ends = bag + 1 < bags || end == ids || ids == INT64_MAX;
    if (begin < 0 || begin > end || end > ids || !starts || !ends) {
      BagMistake::Note(mistake, BagMistake::kSplits, bag);
    }
  }

 private:
  KVTABLE_HOST_DEVICE int64_t Clamped(int64_t x, int64_t least) const {
    return x < least ? least : x > ids ? ids : x;
  }
};

}  // namespace kvtable
