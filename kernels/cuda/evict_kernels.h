// Kernel bodies that find the lowest rows of a bounded table, exactly, and remove them.
//
// To look at all rows for each batch would cost more than the batch. So there is a list of low rows: every
// row that is not above a bound is on it, once. Rows join it when they are given such a rank, whatever
// becomes of the others on it, which are passed over: they have gone, or risen. As long as it has enough rows
// it is all that is read; when it has not, or when it is mostly entries that stand for nothing any more, it
// is made anew, with another bound, by one reading of all ranks (16 bytes per row).
//
// Both the bound and the last row to go are found through samples: rows drawn by a hash, put in order by
// comparing each with each. One of them that has about as many rows below it as the list is to have is the
// bound. And of samples of the list, the first that has not fewer rows below it than have to go, together
// with the one before, leaves few rows between the two, which are again compared with one another. What is
// drawn decides how long that takes, never which rows go.
//
// How many rows go is known on the device only: where it is none, launches end at once.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/hash.h"
#include "base/host_device.h"
#include "batch_claims.h"
#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "erase_kernels.h"
#include "row_ranks.h"
#include "score_kernels.h"

namespace kvtable {

// Which rows may go, and how they are looked at.
struct EvictionView {
  RankedRowsView rows;
  const RowCounters* counters = nullptr;
  // The batch's own rows are those whose order, with kOwn, is at least this.
  uint64_t first_own = DeviceRank::kOwn;
  uint32_t num_samples = 0;  // 1 to kMostSamples
  uint64_t seed = 0;         // of samples
  uint64_t lanes = 0;        // that look at rows: all together, one after the other

  // A row that is not there may not.
  KVTABLE_HOST_DEVICE bool MayGo(const DeviceRank& rank) const {
    return (rank.order & ~DeviceRank::kUnlisted) < first_own;
  }
  KVTABLE_HOST_DEVICE bool MayGoFromList(const DeviceRank& rank) const {
    return MayGo(rank) && !(rows.words->bound < rank.Bare());
  }
  KVTABLE_HOST_DEVICE const DeviceRank& RankOf(uint32_t row) const { return rows.ranks.ranks[row]; }
};

// How many rows go. One warp.
struct BeginEvictionBody {
  EvictionView view;
  uint32_t max_capacity;
  uint64_t* count;  // the caller's, or null

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    EvictionWords* const words = view.rows.words;
    for (uint32_t c = lanes.lane(); c <= EvictionWords::kMostSamples; c += Lanes::kCount)
      words->counts[c] = 0;
    if (lanes.lane() != 0) return;
    const uint32_t there = view.counters->high_water - view.counters->free;
    const uint32_t others = there - words->own;
    words->excess = there > max_capacity ? there - max_capacity : 0;
    words->wanted = words->excess < others ? words->excess : others;
    words->earliest = words->excess - words->wanted;
    words->evicted += words->excess;
    if (count != nullptr) *count = words->excess;
    words->eligible = 0;
    words->relists = 0;
    words->victims = 0;
    words->close = 0;
  }
};

// Counts the rows on the list that may go.
struct CountEligibleBody {
  EvictionView view;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0) return;
    uint32_t eligible = 0;
    for (uint64_t i = first + lanes.lane(); i < words->listed; i += view.lanes) {
      if (view.MayGoFromList(view.RankOf(view.rows.list[i]))) ++eligible;
    }
    eligible = lanes.Sum(eligible);
    if (lanes.lane() == 0 && eligible != 0) FetchAdd(&words->eligible, eligible);
  }
};

// Whether the list will do. One lane.
struct JudgeListBody {
  EvictionView view;
  uint32_t most_listed;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    EvictionWords* const words = view.rows.words;
    if (lanes.lane() != 0 || words->wanted == 0) return;
    words->relists = words->eligible < words->wanted || words->listed > most_listed ? 1 : 0;
  }
};

// Draws rows, of all or of the list; one that may not go counts as the highest.
struct SampleBody {
  EvictionView view;
  bool of_list;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    const uint64_t i = first + lanes.lane();
    if (words->wanted == 0 || (!of_list && words->relists == 0) || i >= view.num_samples) return;
    const uint32_t all = of_list ? words->listed : view.counters->high_water;
    const uint32_t at = static_cast<uint32_t>(Mix64(view.seed + i) % all);
    const DeviceRank rank = view.RankOf(of_list ? view.rows.list[at] : at);
    words->samples[i] = (of_list ? view.MayGoFromList(rank) : view.MayGo(rank)) ? rank.Bare() : HighestRank();
  }
};

// Puts the samples in order, those of the list or of all. A warp has a sample.
struct OrderSamplesBody {
  EvictionView view;
  bool of_list;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0 || (!of_list && words->relists == 0)) return;
    const uint32_t mine = static_cast<uint32_t>(first / Lanes::kCount);
    const DeviceRank rank = words->samples[mine];
    uint32_t before = 0;
    for (uint32_t i = lanes.lane(); i < view.num_samples; i += Lanes::kCount) {
      const DeviceRank& other = words->samples[i];
      if (other < rank || (i < mine && !(rank < other))) ++before;
    }
    before = lanes.Sum(before);
    if (lanes.lane() == 0) words->splitters[before] = rank;
  }
};

// The bound of a new list, which is to have about `target` rows that may go. One lane.
struct PickBoundBody {
  EvictionView view;
  uint64_t target;
  uint64_t least_samples;  // below it

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    EvictionWords* const words = view.rows.words;
    if (lanes.lane() != 0 || words->wanted == 0 || words->relists == 0) return;
    uint32_t drawn = 0;  // samples that are rows
    for (uint32_t end = view.num_samples; drawn < end;) {
      const uint32_t middle = drawn + (end - drawn) / 2;
      if (words->splitters[middle] < HighestRank()) {
        drawn = middle + 1;
      } else {
        end = middle;
      }
    }
    const uint64_t others = view.counters->high_water - view.counters->free - words->own;
    uint64_t at = drawn * target / others;  // a row is wanted, so there are others
    if (at < least_samples) at = least_samples;
    words->bound = at < drawn ? words->splitters[at] : HighestRank();
    words->listed = 0;
    words->eligible = 0;
  }
};

// Lists all rows that are not above the bound.
struct ListLowestBody {
  EvictionView view;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0 || words->relists == 0) return;
    const DeviceRank bound = words->bound;
    uint32_t eligible = 0;
    for (uint64_t begin = first; begin < view.counters->high_water; begin += view.lanes) {
      const uint64_t row = begin + lanes.lane();
      bool joins = false;
      if (row < view.counters->high_water) {
        DeviceRank* const at = &view.rows.ranks.ranks[row];
        const DeviceRank rank = *at;
        joins = rank.IsRanked() && !(bound < rank.Bare());
        const uint64_t unlisted = joins ? 0 : DeviceRank::kUnlisted;
        if ((rank.order & DeviceRank::kUnlisted) != unlisted) at->order = rank.order ^ DeviceRank::kUnlisted;
        if (joins && view.MayGo(rank)) ++eligible;
      }
      const uint32_t n = lanes.Count(joins, &words->listed);
      if (joins) view.rows.list[n] = static_cast<uint32_t>(row);
    }
    eligible = lanes.Sum(eligible);
    if (lanes.lane() == 0 && eligible != 0) FetchAdd(&words->eligible, eligible);
  }
};

// Where the samples said less than there is to go, the list takes all rows. One lane.
struct JudgeBoundBody {
  EvictionView view;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    EvictionWords* const words = view.rows.words;
    if (lanes.lane() != 0 || words->wanted == 0 || words->relists == 0) return;
    words->relists = words->eligible < words->wanted ? 1 : 0;
    if (words->relists == 0) return;
    words->bound = HighestRank();
    words->listed = 0;
    words->eligible = 0;
  }
};

// Counts the rows of the list between each two splitters: bin b is above splitter b - 1, and not above b.
struct CountBinsBody {
  EvictionView view;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0) return;
    for (uint64_t begin = first; begin < words->listed; begin += view.lanes) {
      const uint64_t i = begin + lanes.lane();
      bool counts = false;
      uint32_t bin = 0;
      if (i < words->listed) {
        const DeviceRank rank = view.RankOf(view.rows.list[i]);
        counts = view.MayGoFromList(rank);
        for (uint32_t end = view.num_samples; counts && bin < end;) {
          const uint32_t middle = bin + (end - bin) / 2;
          if (words->splitters[middle] < rank.Bare()) {
            bin = middle + 1;
          } else {
            end = middle;
          }
        }
      }
      lanes.CountEach(counts, bin, words->counts);
    }
  }
};

// Which bin has the last row to go. One warp.
struct PickBinBody {
  EvictionView view;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0) return;
    // Each lane has a run of bins; those beyond the samples are empty.
    constexpr uint32_t kEach = EvictionWords::kMostSamples / Lanes::kCount + 1;
    const uint32_t begin = lanes.lane() * kEach;
    uint32_t rows = 0;
    KVTABLE_UNROLL
    for (uint32_t b = 0; b < kEach; ++b) {
      if (begin + b <= EvictionWords::kMostSamples) rows += words->counts[begin + b];
    }
    uint32_t below = 0;
    for (uint32_t lane = 0; lane < Lanes::kCount; ++lane) {
      const uint32_t theirs = lanes.From(lane, rows);
      if (lane < lanes.lane()) below += theirs;
    }
    if (below >= words->wanted || below + rows < words->wanted) return;
    uint32_t bin = begin;
    uint32_t left = words->wanted - below;
    while (words->counts[bin] < left) left -= words->counts[bin++];
    words->bin = bin;
    words->left = left;
  }
};

// The rows that go, and those of the bin that are too close to call.
struct VictimRows {
  uint32_t* rows;           // room for all that go
  uint32_t* close;          // (room)
  DeviceRank* close_ranks;  // (room) theirs, bare
  uint32_t room;
};

struct TakeVictimsBody {
  EvictionView view;
  VictimRows victims;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0) return;
    for (uint64_t begin = first; begin < words->listed; begin += view.lanes) {
      const uint64_t i = begin + lanes.lane();
      uint32_t row = kNoRow;
      bool goes = false;
      bool is_close = false;
      if (i < words->listed) {
        row = view.rows.list[i];
        const DeviceRank rank = view.RankOf(row);
        if (view.MayGoFromList(rank)) {
          goes = words->bin > 0 && !(words->splitters[words->bin - 1] < rank.Bare());
          is_close =
              !goes && (words->bin == view.num_samples || !(words->splitters[words->bin] < rank.Bare()));
        }
      }
      const uint32_t n = lanes.Count(goes, &words->victims);
      if (goes) victims.rows[n] = row;
      const uint32_t c = lanes.Count(is_close, &words->close);
      if (is_close && c < victims.room) {
        victims.close[c] = row;
        victims.close_ranks[c] = view.RankOf(row).Bare();
      }
    }
  }
};

// Of the rows that are close the lowest; of equal ranks, which rows of several parts may have, those that come first.
// A warp has one after the other. Where there are more than there is
// room for, it finds them on the list.
struct TakeCloseBody {
  EvictionView view;
  VictimRows victims;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    EvictionWords* const words = view.rows.words;
    if (words->wanted == 0) return;
    const bool has_room = words->close <= victims.room;
    const uint32_t n = has_room ? words->close : words->listed;
    for (uint64_t at = first / Lanes::kCount; at < n; at += view.lanes / Lanes::kCount) {
      const uint32_t row = has_room ? victims.close[at] : view.rows.list[at];
      if (!has_room && !IsClose(view.RankOf(row))) continue;
      uint32_t before =
          has_room ? CountBefore(lanes, static_cast<uint32_t>(at)) : CountListedBefore(lanes, at);
      before = lanes.Sum(before);
      if (lanes.lane() == 0 && before < words->left) victims.rows[FetchAdd(&words->victims, 1u)] = row;
    }
  }

 private:
  // Of the rows that a lane looks at, how many come before the one at a place.
  template <class Lanes>
  KVTABLE_HOST_DEVICE uint32_t CountBefore(const Lanes& lanes, uint32_t at) const {
    const DeviceRank rank = victims.close_ranks[at];
    const uint32_t n = view.rows.words->close;
    uint32_t before = 0;
    uint32_t i = lanes.lane();
    constexpr uint32_t kAtOnce = 4;
    for (; i + (kAtOnce - 1) * Lanes::kCount < n; i += kAtOnce * Lanes::kCount) {
      DeviceRank others[kAtOnce];
      KVTABLE_UNROLL
      for (uint32_t u = 0; u < kAtOnce; ++u) others[u] = victims.close_ranks[i + u * Lanes::kCount];
      KVTABLE_UNROLL
      for (uint32_t u = 0; u < kAtOnce; ++u)
        before += ComesBefore(others[u], i + u * Lanes::kCount, rank, at);
    }
    for (; i < n; i += Lanes::kCount) before += ComesBefore(victims.close_ranks[i], i, rank, at);
    return before;
  }

  template <class Lanes>
  KVTABLE_HOST_DEVICE uint32_t CountListedBefore(const Lanes& lanes, uint64_t at) const {
    const DeviceRank rank = view.RankOf(view.rows.list[at]).Bare();
    uint32_t before = 0;
    for (uint32_t i = lanes.lane(); i < view.rows.words->listed; i += Lanes::kCount) {
      const DeviceRank other = view.RankOf(view.rows.list[i]);
      if (IsClose(other)) before += ComesBefore(other.Bare(), i, rank, at);
    }
    return before;
  }

  KVTABLE_HOST_DEVICE static uint32_t ComesBefore(const DeviceRank& a, uint64_t at_a, const DeviceRank& b,
                                                  uint64_t at_b) {
    return a < b || (at_a < at_b && !(b < a)) ? 1 : 0;
  }

  KVTABLE_HOST_DEVICE bool IsClose(const DeviceRank& rank) const {
    const EvictionWords* const words = view.rows.words;
    const DeviceRank bare = rank.Bare();
    return view.MayGoFromList(rank) && (words->bin == 0 || words->splitters[words->bin - 1] < bare) &&
           (words->bin == view.num_samples || !(words->splitters[words->bin] < bare));
  }
};

// ---- A batch with more keys than the capacity

// For a stable sort that puts the last occurrences of rows first.
struct NoteLastsBody {
  BatchClaims claims;       // of the last occurrences
  const uint32_t* numbers;  // (n)
  uint64_t n;
  uint32_t* is_other;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n) return;
    is_other[i] = numbers[i] != kNoRow && claims.Counts(numbers[i], static_cast<uint32_t>(i)) ? 0 : 1;
  }
};

// The batch's own earliest rows go, after all others.
struct TakeEarliestBody {
  const EvictionWords* words;
  const uint32_t* numbers;  // (n)
  const uint32_t* places;   // (n): of last occurrences first, in the order of the batch
  uint64_t n;
  uint32_t* victims;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n && i < words->earliest) victims[words->wanted + i] = numbers[places[i]];
  }
};

// ---- In order, for the caller

// One of the four words of each victim's rank, the least significant first; those that are not there, and
// the batch's own, which are in order, come last.
struct RankWordBody {
  EvictionView view;
  const uint32_t* victims;
  const uint32_t* order;  // (n): of victims, so far
  uint64_t n;
  int word;
  uint32_t* out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n) return;
    uint32_t value = UINT32_MAX;
    if (order[i] < view.rows.words->wanted) {
      const DeviceRank rank = view.RankOf(victims[order[i]]).Bare();
      value = static_cast<uint32_t>((word < 2 ? rank.order : rank.score) >> (word % 2 * 32));
    }
    out[i] = value;
  }
};

struct OrderVictimsBody {
  const EvictionWords* words;
  const uint32_t* victims;
  const uint32_t* order;  // (n)
  uint64_t n;
  uint32_t* out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n && i < words->excess) out[i] = victims[order[i]];
  }
};

struct CopyVictimsBody {
  EvictionView view;
  const uint32_t* victims;  // (n)
  uint64_t n;
  void* keys;  // (n) or null
  bool narrow;
  uint64_t* scores;  // (n) or null

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || i >= view.rows.words->excess) return;
    if (keys != nullptr) StoreKey(view.rows.ranks.keys[victims[i]], keys, narrow, i);
    if (scores != nullptr) scores[i] = view.RankOf(victims[i]).score;
  }
};

// ---- The end

struct EraseVictimsBody {
  static constexpr bool kWholeBlocks = true;

  const EvictionWords* words;
  DeviceIndex index;
  DeviceRows rows;
  const uint32_t* victims;
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (words->excess == 0) return;
    const uint64_t i = first + lanes.lane();
    const bool goes = i < n && i < words->excess;
    const uint64_t key = goes ? rows.ranks.keys[victims[i]] : 0;
    GiveBackInBlock(lanes, rows, goes ? index.Erase(key) : kNoRow, key);
  }
};

}  // namespace kvtable
