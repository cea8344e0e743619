// The keys of a table being written: mixed, sorted, each with the number of the row that it came with.
#pragma once

#include <cstdint>
#include <memory>

#include "kvtable/parallel_for.h"

namespace kvtable {

struct MixedKey {
  uint64_t mixed;
  uint64_t row;
};

// Sorts by mixed key, then by row, in place.
void SortMixedKeys(MixedKey* keys, int64_t n, ParallelFor& threads);

}  // namespace kvtable
