// The scores of a bounded table's rows, and which rows are the lowest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "eviction/rank.h"
#include "kvtable/table.h"
#include "memory/prefetch.h"

namespace kvtable {

// Ranks by position (shard << 32 | row), and a heap of the lowest of them.
//
// The heap does not hold all rows. `Lowest` fills it by one scan with the lowest eighth; from then on it
// holds each row whose rank is at most `bound_`, and when it runs dry the next scan comes. So a rank is
// written without touching the heap, a scan of n rows is paid for by n / 8 rows that went or rose, and each
// of those costs O(log n). An entry stands for its row as long as it equals the row's rank; others are
// dropped when they come up.
//
// Memory per row: 16 bytes for the rank, and up to 6 for the heap once something was evicted.
//
// Not thread-safe.
class RankedRows {
 public:
  explicit RankedRows(int shards) : shards_(static_cast<size_t>(shards)) {}

  // The rank of a row, to be read or written. After it was changed, RankChanged(position) before the next
  // Lowest.
  Rank& At(uint64_t position) {
    Shard& shard = shards_[position >> 32];
    const uint32_t row = static_cast<uint32_t>(position);
    if (row >> kChunkBits >= shard.size()) Grow(&shard, row);
    return shard[row >> kChunkBits][row & (kChunkRows - 1)];
  }
  Rank Get(uint64_t position) const {
    const Shard& shard = shards_[position >> 32];
    const uint32_t row = static_cast<uint32_t>(position);
    return row >> kChunkBits < shard.size() ? shard[row >> kChunkBits][row & (kChunkRows - 1)] : Rank();
  }
  // The row has gone. Rows of different shards may be forgotten at once.
  void Forget(uint64_t position) noexcept {
    Shard& shard = shards_[position >> 32];
    const uint32_t row = static_cast<uint32_t>(position);
    if (row >> kChunkBits < shard.size()) shard[row >> kChunkBits][row & (kChunkRows - 1)] = {};
  }
  void Prefetch(uint64_t position) const {
    const Shard& shard = shards_[position >> 32];
    const uint32_t row = static_cast<uint32_t>(position);
    if (row >> kChunkBits < shard.size()) {
      PrefetchToWrite(&shard[row >> kChunkBits][row & (kChunkRows - 1)]);
    }
  }

  // Tells of a row whose rank was changed.
  void RankChanged(uint64_t position) {
    const Rank rank = At(position);
    if (rank.order != 0 && !(bound_ < rank)) Push({rank, position});
  }

  // The position of the lowest of about `rows` rows, without those for which skip(rank, position), or kNoPosition.
  // Rows that were skipped have to be offered again before the next call with another `skip`.
  template <class Skip>
  uint64_t Lowest(int64_t rows, const Skip& skip) {
    for (bool filled = false;; filled = true) {
      while (!heap_.empty()) {
        const Entry entry = Pop();
        if (At(entry.position) == entry.rank && !skip(entry.rank, entry.position)) return entry.position;
      }
      if (filled) return kNoPosition;
      Fill(std::max(kLeastFill, static_cast<size_t>(rows) / 8), skip);
    }
  }

  void Clear();
  int64_t bytes() const;

 private:
  static constexpr int kChunkBits = 12;
  static constexpr uint32_t kChunkRows = 1u << kChunkBits;
  static constexpr size_t kLeastFill = 1024;
  using Shard = std::vector<std::unique_ptr<Rank[]>>;
  struct Entry {
    Rank rank;
    uint64_t position;
  };

  static void Grow(Shard* shard, uint32_t row);
  void Push(const Entry& entry);
  Entry Pop();
  void EmptyHeap();  // the heap, until the next fill

  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (size_t s = 0; s < shards_.size(); ++s) {
      for (size_t c = 0; c < shards_[s].size(); ++c) {
        const Rank* const ranks = shards_[s][c].get();
        for (uint32_t r = 0; r < kChunkRows; ++r) {
          if (ranks[r].order != 0) visit(ranks[r], uint64_t{s} << 32 | (c << kChunkBits | r));
        }
      }
    }
  }

  // Puts the lowest `wanted` rows into the heap.
  template <class Skip>
  void Fill(size_t wanted, const Skip& skip) {
    EmptyHeap();
    Rank most{UINT64_MAX, UINT64_MAX};
    ForEach([&](const Rank& rank, uint64_t position) {
      if (most < rank || skip(rank, position)) return;
      heap_.push_back({rank, position});
      if (heap_.size() == 2 * wanted) most = KeepLowest(wanted);
    });
    if (heap_.size() > wanted) KeepLowest(wanted);
    Heapify(wanted);
  }
  Rank KeepLowest(size_t count);
  void Heapify(size_t wanted);

  std::vector<Shard> shards_;
  std::vector<Entry> heap_;  // the lowest on top
  Rank bound_;               // {0, 0}: no row is in the heap
  size_t most_entries_ = 0;
};

}  // namespace kvtable
