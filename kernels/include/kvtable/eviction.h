// What a bounded table evicts, and what it gives back of it.
//
// Below its capacity a table evicts nothing. After a batch that inserted, the rows with the lowest score go
// until `TableOptions::max_capacity` are left; of equal scores the one that was set longer ago (kCustom:
// whose row is older). Rows of the batch itself stay, unless the batch alone has more keys than the capacity:
// then its earliest go, a key standing where it occurs last. (An import is no such batch: its rows stand by
// their scores, like the others.)
#pragma once

#include <cstdint>

#include "kvtable/parallel_for.h"

namespace kvtable {

// Where a row's score, 64 bits, comes from. Touches are training lookups, upserts, accumulates and updates;
// read-only lookups are none.
enum class Eviction : uint8_t {
  // The time of the last touch: microseconds since 1970, the same for all rows of a batch and larger from
  // batch to batch.
  kLru,
  // How many times the key was looked up (in training), upserted or accumulated, each occurrence counted, in
  // the high 32 bits (saturating); the second of the last touch in the low ones. An update inserts a row with
  // a count of one, and leaves the count of others alone: a lookup came before it.
  kLfu,
  // What Table::SetScores said; 0 until then.
  kCustom,
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
