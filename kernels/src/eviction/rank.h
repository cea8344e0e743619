// Which row of a bounded table goes first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "base/host_device.h"
#include "kvtable/eviction.h"

namespace kvtable {

// A row's place among all: the lower goes first. `order` tells equal scores apart: a row touched later (kCustom: born
// later) has a higher one, and it is 0 of no row. Rows that came from several parts may be equal.
struct Rank {
  uint64_t score = 0;
  uint64_t order = 0;  // 0: no row

  friend bool operator<(const Rank& a, const Rank& b) {
    return std::tie(a.score, a.order) < std::tie(b.score, b.order);
  }
  friend bool operator==(const Rank& a, const Rank& b) { return a.score == b.score && a.order == b.order; }
};

// The order of a row that is imported with this one, whatever a file says.
KVTABLE_HOST_DEVICE inline constexpr uint64_t ImportedOrder(uint64_t order) {
  return order == 0 ? 1 : order < RanksIn::kMostOrder ? order : RanksIn::kMostOrder;
}

}  // namespace kvtable
