// Kernel bodies that give the rows of a bounded table their scores (kvtable/eviction.h). A batch's are, a
// launch each:
//
//   AdvanceClockBody         the time of the batch
//   CountTouchesBody adds each occurrence to its row's count, where scores have one
//   TouchBody        scores each row once
//
// Rows that come to be among the lowest go on the list of these (evict_kernels.h).
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/host_device.h"
#include "batch_claims.h"
#include "batch_keys.h"
#include "device_index.h"
#include "eviction/eviction_score.h"
#include "eviction/rank.h"
#include "eviction_tuning.h"
#include "row_ranks.h"

namespace kvtable {

// Where an eviction stands, in device memory.
struct EvictionWords {
  static constexpr uint32_t kMostSamples = EvictionTuning::kMostSamples;

  // From batch to batch. All bits zero at first.
  uint64_t clock;    // microseconds since 1970, of the last batch
  uint64_t evicted;  // rows so far
  // Every row that is not above `bound` is on the list, once; others may be. All orders are above 0, so at
  // first none is.
  DeviceRank bound;
  uint32_t listed;

  // Of the present batch.
  uint32_t own;     // its distinct rows
  uint32_t excess;  // rows that go: the `wanted` lowest of others, and the batch's `earliest`
  uint32_t wanted;
  uint32_t earliest;
  uint32_t eligible;  // rows on the list that may go, not above `bound`
  uint32_t relists;   // whether the list is made anew
  uint32_t victims;   // found so far
  uint32_t bin;       // between two splitters, which has the last row to go
  uint32_t left;      // how many of its rows go
  uint32_t close;     // its rows

  DeviceRank samples[kMostSamples];
  DeviceRank splitters[kMostSamples];  // the samples in order
  uint32_t counts[kMostSamples + 1];   // rows in each bin
};

// Ranks, and the list of the lowest, as kernels see them.
struct RankedRowsView {
  DeviceRanks ranks;
  EvictionWords* words = nullptr;
  uint32_t* list = nullptr;  // room for every row

  // Gives a row its rank: where `changes`, in the one lane of the launch that has this row. `to.order` may
  // have kOwn. All lanes take part.
  template <class Lanes>
  KVTABLE_HOST_DEVICE void Set(const Lanes& lanes, bool changes, uint32_t row, const DeviceRank& to) const {
    const bool joins = changes && Joins(row, to);
    const uint32_t n = lanes.Count(joins, &words->listed);
    if (joins) list[n] = row;
  }
  // The same in a body for whole blocks, all lanes of which take part.
  template <class Lanes>
  KVTABLE_HOST_DEVICE void SetInBlock(const Lanes& lanes, bool changes, uint32_t row,
                                      const DeviceRank& to) const {
    const bool joins = changes && Joins(row, to);
    const uint32_t n = lanes.CountInBlock(joins ? 1 : 0, &words->listed);
    if (joins) list[n] = row;
  }

  // Two rows change their numbers, between batches. All lanes take part.
  template <class Lanes>
  KVTABLE_HOST_DEVICE void Swap(const Lanes& lanes, bool swaps, uint32_t a, uint32_t b) const {
    if (ranks.ranks == nullptr) return;
    DeviceRank of_a{0, 0};
    DeviceRank of_b{0, 0};
    if (swaps) {
      of_a = ranks.ranks[a].Bare();
      of_b = ranks.ranks[b].Bare();
      const uint64_t key = ranks.keys[a];
      ranks.keys[a] = ranks.keys[b];
      ranks.keys[b] = key;
    }
    Set(lanes, swaps, a, of_b);
    Set(lanes, swaps, b, of_a);
  }

 private:
  // Writes a row's rank, and returns whether the row comes to be on the list.
  KVTABLE_HOST_DEVICE bool Joins(uint32_t row, const DeviceRank& to) const {
    DeviceRank* const rank = &ranks.ranks[row];
    uint64_t unlisted = rank->order & DeviceRank::kUnlisted;
    const bool joins = unlisted != 0 && !(words->bound < to.Bare());
    if (joins) unlisted = 0;
    *rank = {to.score, to.order | unlisted};
    return joins;
  }
};

// One lane.
struct AdvanceClockBody {
  EvictionWords* words;
  uint64_t now;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0) return;
    words->clock = NextTime(words->clock, now);
    words->own = 0;
  }
};

struct CountTouchesBody {
  DeviceRanks ranks;
  const uint32_t* numbers;  // (n); kNoRow is left out, here and below
  uint64_t n;
  int shift;  // of the count in a score

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || numbers[i] == kNoRow) return;
    // The low half lies first, on all that this runs on.
    uint32_t* const count = reinterpret_cast<uint32_t*>(&ranks.ranks[numbers[i]].score) + shift / 32;
    // Whoever carries the count past the largest number sets it there afterwards, so there it ends.
    if (FetchAdd(count, 1u) == UINT32_MAX) StoreRelaxed(count, UINT32_MAX);
  }
};

struct TouchBody {
  static constexpr bool kWholeBlocks = true;

  RankedRowsView rows;
  BatchClaims claims;       // of the last occurrences or, for kCustom, the first
  const uint32_t* numbers;  // (n)
  uint64_t n;
  Eviction eviction;
  bool counted;  // the occurrences were
  uint32_t epoch;
  uint64_t first_order;
  bool marks_own;  // kCustom: for what comes next

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t row = i < n ? numbers[i] : kNoRow;
    const bool counts = row != kNoRow && claims.Counts(row, static_cast<uint32_t>(i));
    DeviceRank to{0, 0};
    if (counts) {
      const DeviceRank from = rows.ranks.ranks[row];
      to = {from.score, first_order + i};
      if (eviction == Eviction::kCustom) {
        if (from.IsRanked()) to.order = from.Bare().order;
        if (marks_own) to.order |= DeviceRank::kOwn;
      } else {
        const uint32_t count = counted || from.IsRanked() ? CountOf(eviction, from.score) : 1;
        to.score = TouchedScore(eviction, count, rows.words->clock, epoch);
      }
    }
    lanes.CountInBlock(counts ? 1 : 0, &rows.words->own);
    rows.SetInBlock(lanes, counts, row, to);
  }
};

// Ends the marks of a batch's own rows.
struct UnmarkOwnBody {
  DeviceRanks ranks;
  const uint32_t* numbers;  // (n)
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || numbers[i] == kNoRow) return;
    uint64_t* const order = &ranks.ranks[numbers[i]].order;
    // A row that has gone keeps all its bits.
    if ((LoadRelaxed(order) & DeviceRank::kOrder) != DeviceRank::kOrder) FetchAnd(order, ~DeviceRank::kOwn);
  }
};

struct ImportRanksBody {
  RankedRowsView rows;
  BatchClaims claims;  // of the last occurrences; of the first for kCustom without scores
  const uint32_t* numbers;
  uint64_t n;
  Eviction eviction;
  const uint32_t* freqs;     // (n), or null: zeros
  const uint32_t* versions;  // (n), or null: zeros
  RanksIn given;
  uint32_t epoch;
  uint64_t first_order;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t row = i < n ? numbers[i] : kNoRow;
    DeviceRank to{0, first_order + i};
    if (row != kNoRow) {
      if (given.scores != nullptr) {
        to.score = given.scores[i];
        if (given.orders != nullptr) to.order = ImportedOrder(given.orders[i]);
      } else if (eviction != Eviction::kCustom) {
        to.score = ImportedScore(eviction, freqs == nullptr ? 0 : freqs[i],
                                 versions == nullptr ? 0 : versions[i], epoch);
      }
      // What is touched from now on is later than all that was imported.
      const uint64_t time = TimeOf(eviction, to.score);
      if (LoadRelaxed(&rows.words->clock) < time) RaiseTo(&rows.words->clock, time);
    }
    bool counts = row != kNoRow && claims.Counts(row, static_cast<uint32_t>(i));
    if (counts && eviction == Eviction::kCustom && given.scores == nullptr) {
      counts = !rows.ranks.ranks[row].IsRanked();
    }
    rows.Set(lanes, counts, row, to);
  }
};

// Sets the scores of rows that are there, of equal keys' the last one.
struct SetScoresBody {
  static constexpr bool kWholeBlocks = true;

  RankedRowsView rows;
  BatchClaims claims;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  const uint64_t* scores;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t row = i < n ? numbers[i] : kNoRow;
    const bool counts = row != kNoRow && claims.Counts(row, static_cast<uint32_t>(i));
    DeviceRank to{0, 0};
    if (counts) to = {scores[i], rows.ranks.ranks[row].order & ~DeviceRank::kUnlisted};
    rows.SetInBlock(lanes, counts, row, to);
  }
};

// The score of each key's row; 0 where it is missing.
struct ScoresBody {
  BatchKeys keys;
  DeviceIndex index;
  DeviceRanks ranks;
  uint64_t* out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= keys.n) return;
    const uint32_t row = index.Find(keys.At(i));
    out[i] = row == kNoRow ? 0 : ranks.ranks[row].score;
  }
};

}  // namespace kvtable
