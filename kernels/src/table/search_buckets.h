// Searches of the buckets that keys are at home in, by the best instructions that the CPU has.
#pragma once

#include <cstdint>

#include "table/index.h"

namespace kvtable {

// rows[i] = BucketIndex::Match(hashes[i], homes[i]). Asks for buckets a few steps ahead: they should be in the second-level
// cache by then. Writes the numbers of the keys without a row to `elsewhere`, which has room for n, returns how many, and asks
// for the buckets after their homes.
using SearchHomes = int64_t (*)(const uint64_t* hashes, const BucketRef* homes, int64_t n, uint32_t* rows,
                                uint32_t* elsewhere);

SearchHomes BestSearchHomes();

}  // namespace kvtable
