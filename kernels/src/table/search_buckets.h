// Searches of the buckets that keys are at home in, by the best instructions that the CPU has.
#pragma once

#include <cstdint>

#include "table/index.h"

namespace kvtable {

// rows[i] = BucketIndex::Match(keys[i], homes[i]). Asks for buckets some steps ahead.
using SearchHomes = void (*)(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows);

SearchHomes BestSearchHomes();

}  // namespace kvtable
