// How lanes share a row that an optimizer's rule updates (optimizers/rule.h): 16 lanes of a warp a row, lane
// l the elements l, l + 16, ...; on a CPU thread, its one lane all of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/host_device.h"
#include "lanes.h"
#include "optimizers/rule.h"

namespace kvtable {

// The lanes that share a row. With 16 of them, Sum adds what each has in the order of LaneSum, and all get
// the sum.
template <class Lanes>
struct RowTile;

template <>
struct RowTile<OneLane> {
  static constexpr uint32_t kCount = 1;
  KVTABLE_HOST_DEVICE explicit RowTile(const OneLane&) {}
  KVTABLE_HOST_DEVICE uint32_t lane() const { return 0; }
};

#if defined(__CUDACC__) || defined(KVTABLE_EMULATES_WARPS)
template <>
struct RowTile<Warp> {
  static constexpr uint32_t kCount = 16;
  __device__ explicit RowTile(const Warp&) {}
  __device__ uint32_t lane() const { return threadIdx.x % kCount; }
  template <class C>
  __device__ C Sum(C x) const {
    const unsigned all = 0xffffu << (threadIdx.x & 16u);
    KVTABLE_UNROLL
    for (int half = 8; half > 0; half /= 2) x += __shfl_down_sync(all, x, half, 16);
    return __shfl_sync(all, x, 0, 16);
  }
};
#endif

// A lane's elements of columns in memory.
template <class Tile>
struct LaneOfRow {
  int64_t dim;
  Tile tile;

  KVTABLE_RULE_FUNCTION int64_t begin() const { return tile.lane(); }
  KVTABLE_RULE_FUNCTION int64_t end() const { return dim; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t step() { return Tile::kCount; }
};

template <class C, class Tile, class Term>
KVTABLE_RULE_FUNCTION inline C LaneSum(const LaneOfRow<Tile>& row, const Term& term) {
  static_assert(Tile::kCount == 16);
  C sum = 0;
  for (int64_t j = row.begin(); j < row.end(); j += row.step()) sum += term(j);
  return row.tile.Sum(sum);
}

template <class Tile>
KVTABLE_HOST_DEVICE inline auto RowInMemory(const Tile& tile, int64_t dim) {
  if constexpr (Tile::kCount == 1) {
    return WholeRow{dim};
  } else {
    return LaneOfRow<Tile>{dim, tile};
  }
}

// A lane's elements in arrays of its own, in registers: place j is element lane + 16 j, if there is one. What
// is computed in places beyond goes nowhere.
template <class Tile, int kHeld>
struct HeldRow {
  int64_t dim;
  Tile tile;

  KVTABLE_RULE_FUNCTION static constexpr int64_t begin() { return 0; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t end() { return kHeld; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t step() { return 1; }
};

template <class C, class Tile, int kHeld, class Term>
KVTABLE_RULE_FUNCTION inline C LaneSum(const HeldRow<Tile, kHeld>& row, const Term& term) {
  static_assert(Tile::kCount == 16);
  C sum = 0;
  KVTABLE_UNROLL
  for (int j = 0; j < kHeld; ++j) {
    if (row.tile.lane() + Tile::kCount * j < row.dim) sum += term(j);
  }
  return row.tile.Sum(sum);
}

// The same for a piece of a row, which is enough for rules that do not couple elements. Without a LaneSum, so
// that a rule which does and does not say so fails to compile.
template <int kHeld>
struct HeldPiece {
  KVTABLE_RULE_FUNCTION static constexpr int64_t begin() { return 0; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t end() { return kHeld; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t step() { return 1; }
};

}  // namespace kvtable
