// Which occurrence of a row in a batch counts, the last or the first: a hash map from row to place in the
// batch, in scratch memory that is about as large as the batch.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/hash.h"
#include "base/host_device.h"

namespace kvtable {

// A claim is row << 32 | rank, in one word, so that raising it to another claim of the same row keeps the
// higher rank: the place, or where the first counts, its complement. No row is kNoRow, so all bits set is no
// claim.
struct BatchClaims {
  static constexpr uint64_t kNone = UINT64_MAX;

  uint64_t* claims = nullptr;  // all kNone at first; null: no row occurs twice
  uint64_t count = 0;          // more than there are places in the batch
  bool first = false;          // the first counts, not the last

  KVTABLE_HOST_DEVICE uint32_t RankOf(uint32_t place) const { return first ? ~place : place; }

  KVTABLE_HOST_DEVICE uint64_t HomeOf(uint32_t row) const {
    return (static_cast<uint64_t>(static_cast<uint32_t>(Mix64(row))) * count) >> 32;
  }
  KVTABLE_HOST_DEVICE uint64_t After(uint64_t at) const { return at + 1 == count ? 0 : at + 1; }

  KVTABLE_HOST_DEVICE void Claim(uint32_t row, uint32_t place) const {
    if (claims == nullptr) return;
    const uint64_t mine = static_cast<uint64_t>(row) << 32 | RankOf(place);
    for (uint64_t at = HomeOf(row);; at = After(at)) {
      uint64_t seen = LoadRelaxed(&claims[at]);
      if (seen == kNone && ReplaceRelaxed(&claims[at], &seen, mine)) return;
      if (seen >> 32 != row) continue;
      if (seen < mine) RaiseTo(&claims[at], mine);
      return;
    }
  }

  // Whether this place is the one in the batch that counts for this row. In a launch after the claims.
  KVTABLE_HOST_DEVICE bool Counts(uint32_t row, uint32_t place) const {
    if (row == UINT32_MAX) return false;  // kNoRow
    if (claims == nullptr) return true;
    for (uint64_t at = HomeOf(row);; at = After(at)) {
      if (claims[at] >> 32 == row) return static_cast<uint32_t>(claims[at]) == RankOf(place);
    }
  }
};

}  // namespace kvtable
