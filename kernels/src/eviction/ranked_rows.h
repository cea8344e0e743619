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

// Ranks by position (shard << 32 | row), and a list of the lowest of them.
//
// The list does not hold all rows. `Lowest` makes it by one scan of the lowest eighth, in order; from then on it
// and a heap of those that came below hold each row whose rank is at most `bound_`, and when both run dry the next
// scan comes. So a rank is written without touching either, and a scan of n rows is paid for by n / 8 rows that
// went or rose. An entry stands for its row as long as it equals the row's rank; others are dropped when they
// come up.
//
// Memory per row: 16 bytes for the rank, and up to 6 for the list once something was evicted (9 while it is made).
//
// Not thread-safe, but for ranks of rows of different shards.
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
  bool lists_rows() const { return bound_.order != 0; }  // where it lists none, there is nothing to tell

  // The position of the lowest of about `rows` rows, without those for which skip(rank, position), or kNoPosition.
  // Rows that were skipped have to be offered again before the next call with another `skip`.
  template <class Skip>
  uint64_t Lowest(int64_t rows, const Skip& skip) {
    for (bool filled = false;; filled = true) {
      while (next_ < list_.size() || !below_.empty()) {
        const Entry entry = Take();
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
  static constexpr size_t kAhead = 16;  // ranks of listed rows asked for before the one that comes
  using Shard = std::vector<std::unique_ptr<Rank[]>>;
  struct Entry {
    Rank rank;
    uint64_t position;
  };

  static void Grow(Shard* shard, uint32_t row);
  void Push(const Entry& entry);
  Entry Take();       // the lowest of list and heap, of which one has an entry
  void ForgetList();  // and the heap, until the next fill

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

  // Lists the lowest `wanted` rows.
  template <class Skip>
  void Fill(size_t wanted, const Skip& skip) {
    ForgetList();
    Rank most{UINT64_MAX, UINT64_MAX};
    try {
      ForEach([&](const Rank& rank, uint64_t position) {
        if (most < rank || skip(rank, position)) return;
        list_.push_back({rank, position});
        if (list_.size() == 2 * wanted) most = KeepLowest(wanted);
      });
      if (list_.size() > wanted) KeepLowest(wanted);
      SortList(wanted);
    } catch (...) {  // no memory: half a list is none
      ForgetList();
      throw;
    }
  }
  Rank KeepLowest(size_t count);
  void SortList(size_t wanted);

  std::vector<Shard> shards_;
  std::vector<Entry> list_;  // in order, from next_ on
  size_t next_ = 0;
  std::vector<Entry> below_;  // a heap, the lowest on top
  Rank bound_;                // {0, 0}: no row is in list or heap
  size_t most_below_ = 0;
};

}  // namespace kvtable
