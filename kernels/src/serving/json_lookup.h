// What a lookup of one table asks for, read from JSON. `combiner` and `missing` point into it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvtable/types.h"

namespace kvtable {

struct JsonLookup {
  std::vector<int64_t> keys;    // 64-bit patterns: int32 sign-extended, uint64 as its bits
  bool pooled = false;          // keys in bags
  std::vector<int64_t> splits;  // (bags + 1) where pooled: bag b has the keys [splits[b], splits[b + 1])
  bool weighted = false;        // where pooled only
  std::vector<float> weights;   // (keys) where weighted
  std::string_view combiner;    // "sum", "mean" or "sqrtn" where pooled
  std::string_view missing;     // "zeros", "default", "error", or empty: not said
};

// Reads {"keys": [1, 2]}, {"keys": [[1], [2, 3]], "combiner": "mean"} and the like: server/request.py says what
// may be in it, and reads all of it.
//
// Returns false for anything that is wrong, and for a few things that are not, but that nobody writes (escapes
// in names, a member given twice): request.py then reads the body, and says what is wrong. What is taken here
// it takes, too, with the same result. Neither depends on the locale.
bool ReadJsonLookup(std::string_view body, KeyType key_type, int64_t max_keys, JsonLookup* lookup);

// Whether `splits` are of bags of this many keys: from 0 to it, and never falling.
bool SplitsRise(const std::vector<int64_t>& splits, size_t keys);

}  // namespace kvtable
