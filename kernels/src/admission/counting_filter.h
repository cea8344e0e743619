// A counting Bloom filter with the conservative update. Its cells are a function of the key alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/hash.h"
#include "memory/prefetch.h"

namespace kvtable {

// Cells count up to `most`, and stay there. Not synchronized.
template <class Cell>
class CountingFilter {
 public:
  static constexpr int kMostHashes = 32;

  CountingFilter(int64_t cells, int hashes, uint32_t most)
      : cells_(static_cast<size_t>(cells)), hashes_(hashes), most_(most) {}

  void Prefetch(uint64_t key) const {
    const Walk walk(key);
    for (int i = 0; i < hashes_; ++i) PrefetchToWrite(&cells_[CellOf(walk, i)]);
  }

  uint32_t Count(uint64_t key) const {
    const Walk walk(key);
    uint32_t least = most_;
    for (int i = 0; i < hashes_; ++i) least = std::min<uint32_t>(least, cells_[CellOf(walk, i)]);
    return least;
  }

  // Returns the count then. Only cells that say less are raised.
  uint32_t Add(uint64_t key, uint32_t by) {
    const Walk walk(key);
    const uint32_t count = Count(key);
    const uint32_t to = by > most_ - count ? most_ : count + by;
    for (int i = 0; i < hashes_; ++i) {
      Cell& cell = cells_[CellOf(walk, i)];
      if (cell >= to) continue;
      used_ += cell == 0 ? 1 : 0;
      cell = static_cast<Cell>(to);
    }
    return to;
  }

  void Clear() {
    std::fill(cells_.begin(), cells_.end(), Cell{0});
    used_ = 0;
  }

  template <class Other>
  void Merge(const Other* cells) {
    for (size_t i = 0; i < cells_.size(); ++i) {
      Other other;
      std::memcpy(&other, cells + i, sizeof(other));
      const uint32_t to = std::min<uint32_t>(other, most_);
      if (to <= cells_[i]) continue;
      used_ += cells_[i] == 0 ? 1 : 0;
      cells_[i] = static_cast<Cell>(to);
    }
  }

  const std::vector<Cell>& cells() const { return cells_; }
  int64_t used() const { return used_; }  // cells that are not 0

 private:
  struct Walk {
    explicit Walk(uint64_t key)
        : at(Mix64(key ^ 0xa0761d6478bd642fULL)), step(Mix64(key ^ 0xe7037ed1a0b428dbULL) | 1) {}
    uint64_t at;
    uint64_t step;
  };

  size_t CellOf(const Walk& walk, int i) const {
    __extension__ using Wide = unsigned __int128;
    return static_cast<size_t>(
        (static_cast<Wide>(walk.at + static_cast<uint64_t>(i) * walk.step) * cells_.size()) >> 64);
  }

  std::vector<Cell> cells_;
  const int hashes_;
  const uint32_t most_;
  int64_t used_ = 0;
};

}  // namespace kvtable
