// What makes a table in device memory bounded: the memory for ranks, and the order of the launches in
// score_kernels.h and evict_kernels.h. The table calls it within its operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "batch_claims.h"
#include "device_block.h"
#include "device_index.h"
#include "device_rows.h"
#include "evict_kernels.h"
#include "eviction/eviction_score.h"
#include "eviction_tuning.h"
#include "gradient_kernels.h"
#include "kvtable/device_table.h"
#include "score_kernels.h"

namespace kvtable {

template <class Device>
class Evictor {
 public:
  using Block = DeviceBlock<Device>;

  Evictor(const std::string& table, int64_t max_capacity, Eviction eviction, const EvictionClock& clock,
          const EvictionTuning& tuning)
      : table_(table),
        max_capacity_(max_capacity),
        eviction_(eviction),
        now_(clock ? clock : SystemMicroseconds),
        tuning_(tuning) {
    if (max_capacity < 0 || max_capacity >= int64_t{kPending}) {
      throw Error(ErrorCode::kInvalidArgument,
                  "Table '" + table + "' has a max_capacity of " + std::to_string(max_capacity) +
                      "; expected 1 to " + std::to_string(kPending - 1) + " rows, or 0 for no bound.");
    }
  }

  bool is_bounded() const { return max_capacity_ > 0; }
  int64_t max_capacity() const { return max_capacity_; }
  Eviction eviction() const { return eviction_; }
  DeviceRanks ranks() const { return ranks_; }
  RankedRowsView ranked() const { return {ranks_, words(), list_.template as<uint32_t>()}; }

  int64_t column_bytes() const {
    return static_cast<int64_t>(rank_block_.bytes() + key_block_.bytes() + list_.bytes());
  }
  int64_t scratch_bytes() const { return static_cast<int64_t>(words_.bytes() + scratch_.bytes()); }

  void SetEpoch(uint32_t epoch) {
    if (!is_bounded() || !HasEpochs(eviction_)) {
      ThrowWrongPolicy("has no epochs", "epoch LRU or epoch LFU eviction to set them");
    }
    epoch_ = epoch;
  }
  uint32_t epoch() const { return epoch_; }
  void RequireCustom() const {
    if (!is_bounded() || eviction_ != Eviction::kCustom) {
      ThrowWrongPolicy("takes no scores", "custom eviction to set them");
    }
  }

  // Makes room for this many rows, and a batch of this many keys. `allocate(bytes)` gives a block of device
  // memory, or throws: then all is as it was.
  template <class Allocate>
  void Prepare(Device* device, int64_t rows, int64_t keys, const Allocate& allocate) {
    if (words_.data() == nullptr) {
      words_ = allocate(sizeof(EvictionWords));
      device->Fill(words_.data(), 0, sizeof(EvictionWords));
    }
    Block ranks = Extended<DeviceRank>(device, rank_block_, rows, allocate);
    Block row_keys = Extended<uint64_t>(device, key_block_, rows, allocate);
    Block list = Extended<uint32_t>(device, list_, rows, allocate);
    if (ranks.data() != nullptr) rank_block_ = std::move(ranks);
    if (row_keys.data() != nullptr) key_block_ = std::move(row_keys);
    if (list.data() != nullptr) list_ = std::move(list);
    ranks_ = {rank_block_.template as<DeviceRank>(), key_block_.template as<uint64_t>()};
    if (keys > keys_) {
      const int64_t room = (keys + keys / 4 + 63) / 64 * 64;
      scratch_ = allocate(static_cast<size_t>(kScratchArrays * room + tuning_.most_close) * sizeof(uint32_t) +
                          static_cast<size_t>(tuning_.most_close) * sizeof(DeviceRank));
      keys_ = room;
    }
    rows_ = rows;
  }

  // The time of a batch; before its Touch.
  void AdvanceClock(Device* device) { device->Launch(1, AdvanceClockBody{words(), now_()}); }

  // Touches a batch's rows. `claims` are of the last occurrences or, for kCustom, of the first.
  void Touch(Device* device, const BatchClaims& claims, const uint32_t* numbers, uint64_t n, bool counted,
             bool evicts) {
    if (counted && HasCounts(eviction_)) {
      device->Launch(n, CountTouchesBody{ranks_, numbers, n, CountShift(eviction_)});
    }
    batch_order_ = next_order_;
    next_order_ += n;
    device->Launch(n, TouchBody{ranked(), claims, numbers, n, eviction_, counted, epoch_, batch_order_,
                                evicts && eviction_ == Eviction::kCustom});
  }

  void SetScores(Device* device, const BatchClaims& claims, const uint32_t* numbers, uint64_t n,
                 const uint64_t* scores) {
    device->Launch(n, SetScoresBody{ranked(), claims, numbers, n, scores});
  }

  void Import(Device* device, const BatchClaims& claims, const uint32_t* numbers, uint64_t n,
              const uint32_t* freqs, const uint32_t* versions, const RanksIn& ranks) {
    imported_ = true;
    device->Launch(n, ImportRanksBody{ranked(), claims, numbers, n, eviction_, freqs, versions, ranks, epoch_,
                                      next_order_});
    if (ranks.scores == nullptr || ranks.orders == nullptr) {
      next_order_ += n;
    } else {
      next_order_ = std::max(next_order_, ImportedOrder(ranks.highest_order) + 1);
    }
    device->Fill(&words()->own, 0, sizeof(uint32_t));
  }

  // Finds the rows that go, of a batch of n keys that was touched or, where `imported`, imported. At most n
  // go, for before the batch the table was within its capacity.
  void FindVictims(Device* device, const RowCounters* counters, uint64_t n, bool imported, uint64_t* count) {
    Target target;
    const EvictionView view = BeginView(counters, n, imported, &target);
    device->Launch(1, BeginEvictionBody{view, static_cast<uint32_t>(max_capacity_), count});
    device->Launch(view.lanes, CountEligibleBody{view});
    device->Launch(1, JudgeListBody{view, target.most_listed});
    Sample(device, view, false);
    device->Launch(1, PickBoundBody{view, target.listed, tuning_.least_below_bound});
    device->Launch(view.lanes, ListLowestBody{view});
    device->Launch(1, JudgeBoundBody{view});
    device->Launch(view.lanes, ListLowestBody{view});
    Sample(device, view, true);
    device->Launch(view.lanes, CountBinsBody{view});
    device->Launch(1, PickBinBody{view});
    const VictimRows victims{Scratch(0), Scratch(kScratchArrays), scratch_.template as<DeviceRank>(),
                             static_cast<uint32_t>(tuning_.most_close)};
    device->Launch(view.lanes, TakeVictimsBody{view, victims});
    device->Launch(view.lanes, TakeCloseBody{view, victims});
  }

  // Where the batch alone may have more keys than the capacity: of these the earliest. `claims` are of the
  // last occurrences. `sort(firsts, sorted_firsts, seconds, sorted_seconds, n, bits)` sorts.
  template <class Sort>
  void FindEarliest(Device* device, const BatchClaims& claims, const uint32_t* numbers, uint64_t n,
                    const Sort& sort) {
    device->Launch(n, NoteLastsBody{claims, numbers, n, Scratch(1)});
    device->Launch(n, PlacesBody{Scratch(3), n});
    sort(Scratch(1), Scratch(2), Scratch(3), Scratch(4), n, 1);
    device->Launch(n, TakeEarliestBody{words(), numbers, Scratch(4), n, Scratch(0)});
  }

  // Puts the victims in order, the lowest first, and returns their rows. *limit is how many there are.
  template <class Sort>
  const uint32_t* OrderVictims(Device* device, const RowCounters* counters, uint64_t n, const Sort& sort,
                               const uint32_t** limit) {
    EvictionView view;
    view.rows = ranked();
    view.counters = counters;
    uint32_t* order = Scratch(3);
    uint32_t* sorted = Scratch(4);
    device->Launch(n, PlacesBody{order, n});
    for (int word = 0; word < 4; ++word) {
      const int bits = RankWordBits(word);
      if (bits == 0) continue;
      device->Launch(n, RankWordBody{view, Scratch(0), order, n, word, Scratch(1)});
      sort(Scratch(1), Scratch(2), order, sorted, n, bits);
      std::swap(order, sorted);
    }
    device->Launch(n, OrderVictimsBody{words(), Scratch(0), order, n, Scratch(1)});
    *limit = &words()->excess;
    return Scratch(1);
  }

  // What is known of the first n victims, but for their values.
  void CopyVictims(Device* device, const uint32_t* victims, uint64_t n, bool narrow,
                   const DeviceEvicted& out) {
    EvictionView view;
    view.rows = ranked();
    device->Launch(n, CopyVictimsBody{view, victims, n, out.keys, narrow, out.scores});
  }

  void EraseVictims(Device* device, const DeviceIndex& index, const DeviceRows& rows, uint64_t n) {
    device->Launch(n, EraseVictimsBody{words(), index, rows, Scratch(0), n});
  }

  void UnmarkOwn(Device* device, const uint32_t* numbers, uint64_t n) {
    if (eviction_ == Eviction::kCustom) device->Launch(n, UnmarkOwnBody{ranks_, numbers, n});
  }

  // All rows have gone.
  void Clear(Device* device) {
    imported_ = false;
    if (rank_block_.data() == nullptr) return;
    device->Fill(rank_block_.data(), 0xff, rank_block_.bytes());
    device->Fill(&words()->bound, 0, sizeof(DeviceRank));
    device->Fill(&words()->listed, 0, sizeof(uint32_t));
  }

  // In device memory; null where nothing has been evicted.
  const uint64_t* evicted() const { return words_.data() == nullptr ? nullptr : &words()->evicted; }

 private:
  static constexpr int64_t kScratchArrays = 5;         // of a batch's length
  static constexpr int64_t kLanes = int64_t{1} << 17;  // that read ranks: about as many as a GPU runs

  // How many bits of a word of ranks (RankWordBody) there are to sort by: 0 where it tells no two rows apart that the
  // others do not.
  int RankWordBits(int word) const {
    if (word < 2) {
      int bits = 0;  // of orders, and of what stands for no row: all of them set
      while (bits < 64 && next_order_ >> bits != 0) ++bits;
      return std::clamp(bits - 32 * word, 0, 32);
    }
    // A row that was touched later has a later time in its score, too, until an import brings others.
    const bool has_time = word == 2 ? eviction_ != Eviction::kCustom && eviction_ != Eviction::kEpochLfu
                                    : eviction_ == Eviction::kLru;
    return has_time && !imported_ ? 0 : 32;
  }

  struct Target {
    uint64_t listed = 0;  // rows on a new list
    uint32_t most_listed = 0;
  };

  [[noreturn]] void ThrowWrongPolicy(const char* what, const char* make) const {
    throw Error(ErrorCode::kFailedPrecondition,
                "Table '" + table_ + "' " + what + ": it " +
                    (is_bounded() ? std::string("keeps ") + NameInMessages(eviction_) + " scores."
                                  : std::string("is not bounded.")) +
                    " Make it with " + (is_bounded() ? "" : "a max_capacity and ") + make + ".");
  }

  // None where the block is large enough.
  template <class T, class Allocate>
  static Block Extended(Device* device, const Block& block, int64_t rows, const Allocate& allocate) {
    const size_t bytes = static_cast<size_t>(rows) * sizeof(T);
    if (bytes <= block.bytes()) return {};
    Block extended = allocate(bytes);
    device->Fill(extended.data(), 0xff, bytes);
    if (block.data() != nullptr) device->Copy(extended.data(), block.data(), block.bytes());
    return extended;
  }

  EvictionWords* words() const { return words_.template as<EvictionWords>(); }
  // Behind the ranks of close rows, which come first.
  uint32_t* Scratch(int64_t array) const {
    return reinterpret_cast<uint32_t*>(scratch_.template as<DeviceRank>() + tuning_.most_close) +
           array * keys_;
  }
  // A list that is long is read for each batch, one that is short is soon made anew: the least of both is
  // near the square root of rows x batch.
  EvictionView BeginView(const RowCounters* counters, uint64_t n, bool imported, Target* target) {
    recent_most_ = std::max(n, recent_most_ - recent_most_ / 16);
    const double both = std::sqrt(static_cast<double>(rows_) * static_cast<double>(recent_most_)) / 2;
    target->listed = std::max({tuning_.batches_listed * recent_most_, static_cast<uint64_t>(both),
                               static_cast<uint64_t>(rows_) / 128});
    target->most_listed = static_cast<uint32_t>(std::min(4 * target->listed, uint64_t{UINT32_MAX}));
    EvictionView view;
    view.rows = ranked();
    view.counters = counters;
    if (!imported && eviction_ != Eviction::kCustom) view.first_own = batch_order_;
    view.num_samples =
        static_cast<uint32_t>(std::clamp(rows_ / tuning_.rows_per_sample, int64_t{1}, tuning_.most_samples));
    view.seed = Mix64(next_order_);
    view.lanes = static_cast<uint64_t>(std::min(kLanes, (rows_ + 31) / 32 * 32));
    return view;
  }

  void Sample(Device* device, const EvictionView& view, bool of_list) {
    device->Launch(view.num_samples, SampleBody{view, of_list});
    device->Launch(uint64_t{view.num_samples} * Device::Lanes::kCount, OrderSamplesBody{view, of_list});
  }

  const std::string table_;
  const int64_t max_capacity_;
  const Eviction eviction_;
  const EvictionClock now_;
  const EvictionTuning tuning_;
  uint32_t epoch_ = 0;
  uint64_t next_order_ = 1;   // a row touched later comes later
  uint64_t batch_order_ = 1;  // of the present batch's first key
  bool imported_ = false;     // there may be rows whose scores and orders an import gave

  Block words_;
  Block rank_block_;
  Block key_block_;
  Block list_;
  DeviceRanks ranks_;
  Block scratch_;
  int64_t keys_ = 0;          // that scratch_ has room for
  int64_t rows_ = 0;          // that there is room for
  uint64_t recent_most_ = 0;  // keys of a batch, as far as it is not long ago
};

}  // namespace kvtable
