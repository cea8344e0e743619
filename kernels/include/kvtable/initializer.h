// Initial values: a pure function of (seed, key, column).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/types.h"

namespace kvtable {

// The value of a row that nobody has written yet. The same for a key whatever the order of insertion, the
// number of threads, of parts, and the device: the random kinds hash (seed, key, column) with a counter-based
// generator.
struct Initializer {
  enum class Kind : uint8_t {
    kConstant,         // a
    kUniform,          // [a, b)
    kNormal,           // mean a, standard deviation b
    kTruncatedNormal,  // the same, cut at two standard deviations (by inverse CDF, so no rejection)
    kRows,             // row hash(key) mod num_rows of `rows`, (num_rows, dim) in the table's value type
  };
  Kind kind = Kind::kConstant;
  double a = 0.0;
  double b = 0.0;
  uint64_t seed = 0;
  std::shared_ptr<const std::vector<char>> rows;
  int64_t num_rows = 0;
};

// The 64-bit mix that places keys and picks rows of Kind::kRows. Int32 keys are sign-extended first.
uint64_t HashKey(uint64_t key);

}  // namespace kvtable
