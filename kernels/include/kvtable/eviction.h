// What a bounded table evicts, and what it gives back of it.
//
// Below its capacity a table evicts nothing. After a batch that inserted, the rows with the lowest score go
// until `max_capacity` are left; of equal scores the one that was set longer ago (kCustom: whose row is
// older). Rows of the batch itself stay, unless the batch alone has more keys than the capacity: then its
// earliest go, a key standing where it occurs last. (An import is no such batch: its rows stand by their
// scores, like the others.)
#pragma once

#include <cstdint>
#include <functional>

#include "kvtable/parallel_for.h"

namespace kvtable {

// Where a row's score, 64 bits, comes from. Touches are training lookups, upserts, accumulates and updates;
// read-only lookups are none.
//
// A count is how many times the key was looked up (in training), upserted or accumulated, each occurrence
// counted, up to 2^32 - 1, where it stays. An update inserts a row with a count of one, and leaves the count
// of others alone: a lookup came before it.
//
// An epoch is a number that the caller sets (SetEpoch; 0 until then), say once for each pass over the data.
// Rows touched in a lower epoch go first, whatever else is said of them: so it should only rise.
enum class Eviction : uint8_t {
  // The time of the last touch: microseconds since 1970, the same for all rows of a batch and larger from
  // batch to batch.
  kLru,
  // The count in the high 32 bits; the second of the last touch, since 1970, in the low ones.
  kLfu,
  // What SetScores said; 0 until then.
  kCustom,
  // The epoch of the last touch in the high 32 bits; in the low ones its second, since 1970. Of the rows of
  // one second the one touched longer ago goes first, as of all equal scores.
  kEpochLru,
  // The epoch of the last touch in the high 32 bits, the count in the low ones. It goes on from epoch to
  // epoch.
  kEpochLfu,
};

// Microseconds since 1970, for scores. A table counts on by itself where it stands still or goes back.
using EvictionClock = std::function<uint64_t()>;

// The ranks of rows that are imported, as an export gave them; of a pointer, their scores alone.
struct RanksIn {
  RanksIn(const uint64_t* scores_in = nullptr,
          const uint64_t* orders_in = nullptr)  // NOLINT(google-explicit-constructor)
      : scores(scores_in), orders(orders_in) {}

  const uint64_t* scores;  // (n), or null
  // Of equal scores the lowest goes first: (n), or null: as the rows come, after those that are there. From 1 to
  // kMostOrder; what is beyond counts as that. Without scores they count for nothing.
  const uint64_t* orders;
  uint64_t highest_order =
      0;  // of a table in device memory, which does not look on the host: none is above it

  static constexpr uint64_t kMostOrder = uint64_t{1} << 60;
};

// Takes what a batch evicts, values included.
class EvictedRows {
 public:
  virtual ~EvictedRows() = default;

  // Makes room for n rows, keys (n) and values (n, dim); called once at most, before they are written. May
  // throw: the rows then go all the same.
  virtual void Allocate(int64_t n, void** keys, void** values) = 0;
};

}  // namespace kvtable
