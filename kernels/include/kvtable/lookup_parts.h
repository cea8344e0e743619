// Lookups of tables that come in parts, any number of them at once, straight into place: no key and no row is
// moved to or from a part's own batch.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/table.h"

namespace kvtable {

// The tables that are the parts of one: key k lies in table k floor-mod their number. All are of one key
// type, value type and dim. A table that is not partitioned is its only part.
using TableParts = std::vector<Table*>;

// What a lookup does with a key that is not there: with `insert` it makes its row, otherwise it gives
// `missing` (kZeros or kInitial).
struct MissingKeys {
  bool insert = false;
  Missing missing = Missing::kZeros;
  Stamp stamp;  // of new rows
  // As in Insertion; what has to admit keys is each part's own.
  double admission = 1.0;
  uint64_t admission_seed = 0;
  Missing below = Missing::kZeros;
};

// Whether a lookup has to reach each part as a whole, and is not to be cut up: bounded tables keep the rows of a
// batch in place, and where keys that are not admitted give zeros, all occurrences of a key are to fare alike.
inline bool IsOneBatch(const TableParts& parts, const MissingKeys& missing) {
  const bool admits_some = parts[0]->admitter() != nullptr && missing.below == Missing::kZeros;
  return missing.insert && (parts[0]->max_capacity() > 0 || admits_some);
}

// Table::Gather or GatherOrInsert, as `missing` says.
void LookUpOne(Table* table, const void* keys, int64_t n, const RowsOut& out, const MissingKeys& missing,
               ParallelFor& threads);

struct PartsLookup {
  TableParts parts;
  const void* keys;  // (n) of the tables' key type
  int64_t n;
  RowsOut out;  // `where` is not used: row i goes to place i
  MissingKeys missing;
};

// As Table::Gather or GatherOrInsert on each part, for all lookups at once. Throws what these throw.
void LookUpParts(const std::vector<PartsLookup>& lookups, ParallelFor& threads);

// The same for one lookup, on the calling thread.
void LookUpParts(const PartsLookup& lookup);

}  // namespace kvtable
