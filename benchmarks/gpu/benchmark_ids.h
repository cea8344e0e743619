// The ids of a batch: torch_step.py makes the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace kvtable {

// Each of [0, rows) as likely.
inline std::vector<uint64_t> UniformIds(size_t n, uint64_t rows, uint64_t seed) {
  std::vector<uint64_t> ids(n);
  for (size_t i = 0; i < n; ++i) ids[i] = Mix64(seed << 40 | i) % rows;
  return ids;
}

// After Zipf's law with exponent 1.05, by the inverse of the distribution function of the continuous law;
// which ids are the frequent ones is random.
inline std::vector<uint64_t> ZipfIds(size_t n, uint64_t rows, uint64_t seed) {
  constexpr double kExponent = 1.05;
  const double most = std::pow(static_cast<double>(rows), 1 - kExponent);
  std::vector<uint64_t> ids(n);
  for (size_t i = 0; i < n; ++i) {
    const double u = static_cast<double>(Mix64(seed << 40 | i) >> 11) * 0x1p-53;
    const double rank = std::pow(1 - u * (1 - most), 1 / (1 - kExponent));
    ids[i] = Mix64(static_cast<uint64_t>(rank)) % rows;
  }
  return ids;
}

inline int64_t CountDistinct(std::vector<uint64_t> ids) {
  std::sort(ids.begin(), ids.end());
  return std::unique(ids.begin(), ids.end()) - ids.begin();
}

}  // namespace kvtable
