// A table that evicts: another table, and the ranks of its rows.
//
// Concurrency
//
// `mutex_` lets in one batch at a time of those that change rows or ranks, so that "the rows of this batch"
// is a set that nobody else adds to, and the table is within its capacity whenever nobody is in. It is taken
// before any lock of the inner table, for the whole of a batch, and guards ranks_, aging_, clock_, next_order_
// and epoch_.
// Read-only lookups don't take it: they see the inner table, which for the duration of a batch may hold more
// rows than the capacity.
//
// Threads are lent (ParallelFor::Run) with the mutex in hand. That is safe because no body that is run so
// takes it: the bodies are those of the inner table, and whoever waits for the mutex in a body of its own
// holds up nobody else's.
//
// Row numbers are positions: a row keeps its number until it is removed, here and nowhere else.
#include "eviction/bounded_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "eviction/aging_rows.h"
#include "eviction/eviction_score.h"
#include "eviction/ranked_rows.h"
#include "memory/scratch.h"
#include "table/check_batch.h"
#include "threads/run_tasks.h"

namespace kvtable {
namespace {

constexpr int64_t kAhead = 16;     // ranks asked for before the one being written
constexpr int64_t kBlock = 1024;   // keys of a batch that a thread looks at, to write the ranks of its own
constexpr int64_t kMostParts = 8;  // threads that share out a batch's ranks: each looks at all keys
constexpr int64_t kLeastOfPart = 4096;  // keys, so that waking a thread is worth it

// Where the rows of a batch lie, in the order of its keys.
struct Batch {
  const uint64_t* positions;
  const uint32_t* where;  // key i's is positions[where[i]]; or null
  int64_t n;

  uint64_t operator[](int64_t i) const { return positions[where == nullptr ? i : where[i]]; }
};

class BoundedTable : public Table {
 public:
  BoundedTable(std::unique_ptr<ShardedTable> table, int64_t max_capacity, Eviction eviction,
               const EvictionClock& clock)
      : rows_(std::move(table)),
        max_capacity_(max_capacity),
        eviction_(eviction),
        now_(clock ? clock : SystemMicroseconds),
        ranks_(kMaxShards) {
    rows_->SetRanks({[this](uint64_t position) { return ranks_.Get(position); }, &mutex_});
  }

  // ---- As the inner table has it

  KeyType key_type() const override { return rows_->key_type(); }
  ValueType value_type() const override { return rows_->value_type(); }
  int64_t dim() const override { return rows_->dim(); }
  Initializer initializer() const override { return rows_->initializer(); }
  RowSchema schema() const override { return rows_->schema(); }
  uint64_t generation() const override { return rows_->generation(); }
  int64_t Size() const override { return rows_->Size(); }
  int MaxProbeLength() const override { return rows_->MaxProbeLength(); }
  void Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
              int64_t num_defaults, bool* found, ParallelFor& threads) const override {
    rows_->Gather(keys, n, out, missing, defaults, num_defaults, found, threads);
  }
  void GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                     ParallelFor& threads) const override {
    rows_->GatherColumns(keys, n, out, found, threads);
  }
  void Contains(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    rows_->Contains(keys, n, out, threads);
  }
  void GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                    ParallelFor& threads) const override {
    rows_->GatherStamps(keys, n, freqs, versions, threads);
  }
  void Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const override {
    rows_->Locate(keys, n, positions, threads);
  }
  void KeysAt(const uint64_t* positions, int64_t n, void* keys) const override {
    rows_->KeysAt(positions, n, keys);
  }
  void Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    rows_->Zeroed(keys, n, out, threads);
  }
  int64_t ZeroedRows() const override { return rows_->ZeroedRows(); }
  int64_t SkippedUpdates() const override { return rows_->SkippedUpdates(); }
  LookupCounts lookup_counts() const override { return rows_->lookup_counts(); }
  void IncreaseFrequency(const void* keys, int64_t n, const uint32_t* by, ParallelFor& threads) override {
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);  // for who puts rows aside with their scores
    rows_->IncreaseFrequency(keys, n, by, threads);
  }
  void Reserve(int64_t rows, ParallelFor& threads) override { rows_->Reserve(rows, threads); }
  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) override {
    return rows_->EnsureSlots(slots, threads);
  }
  void SetInitializer(const Initializer& initializer) override { rows_->SetInitializer(initializer); }

  MemoryUse Memory() const override {
    MemoryUse use = rows_->Memory();
    std::lock_guard<std::mutex> hold(mutex_);
    use.column_bytes += ranks_.bytes() + aging_.bytes();
    return use;
  }

  // ---- Batches that touch rows

  void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                      ParallelFor& threads) override {
    CheckBatch(n);
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    int64_t places = out.positions == nullptr ? n : 0;
    for (int64_t i = 0; i < n && out.positions == nullptr && out.where != nullptr; ++i) {
      places = std::max(places, int64_t{out.where[i]} + 1);
    }
    Scratch<uint64_t> scratch(static_cast<size_t>(places));
    uint64_t* const positions = out.positions == nullptr ? scratch.data() : out.positions;
    RankEvenOnFailure(keys, n, threads, [&] {
      rows_->GatherOrInsert(keys, n, {out.rows, positions, out.where, out.widened}, insertion, threads);
    });
    BeforeTouch({positions, out.where, n});
    TouchAndEvict({positions, out.where, n}, true, insertion.evicted, threads);
  }

  void Upsert(const void* keys, int64_t n, const void* values, Stamp stamp, ParallelFor& threads) override {
    Write(keys, n, true, threads, [&] { rows_->Upsert(keys, n, values, stamp, threads); });
  }

  void UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                     ParallelFor& threads) override {
    if (stamp.is_rewrite) {
      rows_->AwaitRoomAside();
      std::lock_guard<std::mutex> hold(mutex_);  // for who puts rows aside with their scores
      return rows_->UpsertColumns(keys, n, in, stamp, threads);
    }
    Write(keys, n, true, threads, [&] { rows_->UpsertColumns(keys, n, in, stamp, threads); });
  }

  void Accumulate(const void* keys, int64_t n, const void* deltas, bool from_zeros, Stamp stamp,
                  ParallelFor& threads) override {
    Write(keys, n, true, threads, [&] { rows_->Accumulate(keys, n, deltas, from_zeros, stamp, threads); });
  }

  void Combine(const void* keys, int64_t n, const void* operands, RowOp op, Stamp stamp,
               ParallelFor& threads) override {
    Write(keys, n, true, threads, [&] { rows_->Combine(keys, n, operands, op, stamp, threads); });
  }

  ApplyCounts Apply(const void* keys, const uint64_t* positions, int64_t n, const GradientsIn& gradients,
                    const Update& update, const SlotColumns& slots, Stamp stamp,
                    ParallelFor& threads) override {
    ApplyCounts counts;
    Write(keys, n, false, threads, [&] {
      counts = rows_->Apply(keys, positions, n, gradients, update, slots, stamp, threads);
      if (counts.skipped == 0 || !rows_->is_watched()) return;
      Scratch<uint64_t> there(static_cast<size_t>(n));  // what was left out is touched all the same
      rows_->Locate(keys, n, there.data(), threads);
      rows_->BeforeScores(there.data(), n);
    });
    return counts;
  }

  void Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const RanksIn& ranks, ParallelFor& threads) override {
    CheckBatch(n);
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    RankEvenOnFailure(keys, n, threads, [&] { rows_->Import(keys, n, in, freqs, versions, {}, threads); });
    Scratch<uint64_t> positions(static_cast<size_t>(n));
    rows_->Locate(keys, n, positions.data(), threads);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t position = positions[static_cast<size_t>(i)];
      if (position == kNoPosition) continue;  // the padding key
      Rank& rank = ranks_.At(position);
      if (ranks.scores != nullptr) {
        rank = {ranks.scores[i], ranks.orders == nullptr ? next_order_ : ImportedOrder(ranks.orders[i])};
        next_order_ = std::max(next_order_, rank.order + 1);
      } else if (eviction_ != Eviction::kCustom) {
        rank = {ImportedScore(eviction_, freqs == nullptr ? 0 : freqs[i],
                              versions == nullptr ? 0 : versions[i], epoch_),
                next_order_++};
      } else if (rank.order == 0) {
        rank = {0, next_order_++};
      }
      clock_ = std::max(clock_, TimeOf(eviction_, rank.score));
      ranks_.RankChanged(position);
      if (rows_->expiry().ages()) aging_.Imported(position, rows_->VersionAt(position));
    }
    if (Excess() > 0) RemoveExpired(Excess(), threads);
    std::vector<uint64_t> victims;
    TakeLowest(Excess(), [](const Rank&, uint64_t) { return false; }, &victims);
    Remove(victims, nullptr, threads);
  }

  int64_t Remove(const void* keys, int64_t n, ParallelFor& threads) override {
    CheckBatch(n);
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    ClearRanks(keys, n, threads);
    return rows_->Remove(keys, n, threads);
  }

  void Clear() override {
    const MomentGate::Alone alone(rows_->gate());  // exports may need the mutex to end
    std::lock_guard<std::mutex> hold(mutex_);
    rows_->Clear();
    ranks_.Clear();
    aging_.Clear();
  }

  // ---- Scores

  int64_t max_capacity() const override { return max_capacity_; }
  Eviction eviction() const override { return eviction_; }
  int64_t EvictedCount() const override { return evicted_.load(std::memory_order_relaxed); }
  int64_t ExpiredCount() const override { return rows_->ExpiredCount(); }

  void Scores(const void* keys, int64_t n, uint64_t* scores, ParallelFor& threads) const override {
    CheckBatch(n);
    std::lock_guard<std::mutex> hold(mutex_);
    ReadScores(keys, n, scores, threads);
  }

  int64_t SetScores(const void* keys, int64_t n, const uint64_t* scores, ParallelFor& threads) override {
    if (eviction_ != Eviction::kCustom) {
      throw Error(ErrorCode::kFailedPrecondition, std::string("The table evicts by its own ") +
                                                      NameInMessages(eviction_) +
                                                      " scores. Make it with custom eviction to set scores.");
    }
    CheckBatch(n);
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    Scratch<uint64_t> positions(static_cast<size_t>(n));
    rows_->Locate(keys, n, positions.data(), threads);
    rows_->BeforeScores(positions.data(), n);
    int64_t there = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t position = positions[static_cast<size_t>(i)];
      if (position == kNoPosition) continue;
      ranks_.At(position).score = scores[i];
      ranks_.RankChanged(position);
      ++there;
    }
    return there;
  }

  void SetEpoch(uint32_t epoch) override {
    if (!HasEpochs(eviction_)) {
      throw Error(ErrorCode::kFailedPrecondition, std::string("The table keeps ") +
                                                      NameInMessages(eviction_) +
                                                      " scores. Make it with epoch LRU or epoch LFU eviction "
                                                      "to set epochs.");
    }
    std::lock_guard<std::mutex> hold(mutex_);
    epoch_ = epoch;
  }
  uint32_t epoch() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return epoch_;
  }

  // ---- Exports and changes: the inner table takes mutex_ where it needs ranks, and between batches for a cut

  std::unique_ptr<Exporter> Export() const override { return rows_->Export(); }
  std::unique_ptr<Exporter> ExportMoment(const MomentOptions& options) override {
    return rows_->ExportMoment(options);
  }
  uint64_t TrackChanges(int64_t max_removed) override { return rows_->TrackChanges(max_removed); }
  bool tracks_changes() const override { return rows_->tracks_changes(); }
  uint64_t CutChanges() override { return rows_->CutChanges(); }
  std::string ChangesLost(uint64_t since) const override { return rows_->ChangesLost(since); }
  void ForgetChanges(uint64_t upto) override { rows_->ForgetChanges(upto); }

  // ---- Expiry

  const Expiry& expiry() const override { return rows_->expiry(); }
  uint32_t Now() const override { return rows_->Now(); }
  void SetStep(uint32_t step) override { rows_->SetStep(step); }
  int64_t EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                     ParallelFor& threads) override {
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    return rows_->EvictSlice(test, cursor, most_rows, threads);
  }
  void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, int64_t* counts,
                  ParallelFor& threads) const override {
    rows_->CountRanks(digit, cursor, most_rows, counts, threads);
  }
  int64_t PassLength() const override { return rows_->PassLength(); }

  // For the inner table: a row goes by age, norm, frequency or rank. Such rows go in batches that have mutex_,
  // as do all that change rows.
  void Forget(uint64_t position) { ranks_.Forget(position); }

 private:
  int64_t Excess() const { return rows_->Size() - max_capacity_; }

  void ReadScores(const void* keys, int64_t n, uint64_t* scores, ParallelFor& threads) const {
    rows_->Locate(keys, n, scores, threads);  // positions first, then what stands there
    for (int64_t i = 0; i < n; ++i) {
      scores[i] = scores[i] == kNoPosition ? 0 : ranks_.Get(scores[i]).score;
    }
  }

  void ClearRanks(const void* keys, int64_t n, ParallelFor& threads) {
    Scratch<uint64_t> positions(static_cast<size_t>(n));
    rows_->Locate(keys, n, positions.data(), threads);
    rows_->BeforeScores(positions.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t position = positions[static_cast<size_t>(i)];
      if (position != kNoPosition) ranks_.At(position) = {};
    }
  }

  // A write that may fail half way through its batch: rows that came to be get their ranks even so.
  template <class Body>
  void RankEvenOnFailure(const void* keys, int64_t n, ParallelFor& threads, const Body& body) {
    try {
      body();
    } catch (...) {
      RankUnrankedRows(keys, n, threads);
      throw;
    }
  }

  void RankUnrankedRows(const void* keys, int64_t n, ParallelFor& threads) noexcept {
    try {
      Scratch<uint64_t> positions(static_cast<size_t>(n));
      rows_->Locate(keys, n, positions.data(), threads);
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t position = positions[static_cast<size_t>(i)];
        if (position == kNoPosition || ranks_.At(position).order != 0) continue;
        Touch(position, false, next_order_++);
        ranks_.RankChanged(position);
      }
    } catch (...) {  // no memory: they get their ranks when they are touched next
    }
  }

  template <class Body>
  void Write(const void* keys, int64_t n, bool counted, ParallelFor& threads, const Body& body) {
    CheckBatch(n);
    rows_->AwaitRoomAside();
    std::lock_guard<std::mutex> hold(mutex_);
    RankEvenOnFailure(keys, n, threads, body);
    Scratch<uint64_t> positions(static_cast<size_t>(n));
    rows_->Locate(keys, n, positions.data(), threads);
    TouchAndEvict({positions.data(), nullptr, n}, counted, nullptr, threads);
  }

  // Rows that were read are touched all the same. (Those that were written have been told of.)
  void BeforeTouch(const Batch& batch) {
    if (!rows_->is_watched() || eviction_ == Eviction::kCustom) return;
    if (batch.where == nullptr) return rows_->BeforeScores(batch.positions, batch.n);
    Scratch<uint64_t> positions(static_cast<size_t>(batch.n));
    for (int64_t i = 0; i < batch.n; ++i) positions[static_cast<size_t>(i)] = batch[i];
    rows_->BeforeScores(positions.data(), batch.n);
  }

  void Touch(uint64_t position, bool counted, uint64_t order) {
    Rank& rank = ranks_.At(position);
    const bool is_new = rank.order == 0;
    if (eviction_ == Eviction::kCustom) {
      if (is_new) rank = {0, order};
      return;
    }
    uint32_t count = is_new ? 0 : CountOf(eviction_, rank.score);
    if ((is_new || counted) && count < UINT32_MAX) ++count;
    rank = {TouchedScore(eviction_, count, clock_, epoch_), order};
  }

  // Touches the rows of a batch, those of a shard by one thread and in the order of the batch.
  void Touch(const Batch& batch, bool counted, ParallelFor& threads) {
    const uint64_t first_order = next_order_;
    next_order_ += static_cast<uint64_t>(batch.n);
    int64_t parts = 1;
    while (2 * parts <= std::min<int64_t>(threads.threads(), kMostParts) && parts * kLeastOfPart < batch.n)
      parts *= 2;
    RunTasks(threads, parts, [&](int64_t part) {
      std::array<int64_t, kBlock> own;
      for (int64_t begin = 0; begin < batch.n; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, batch.n);
        int64_t count = 0;
        for (int64_t i = begin; i < end; ++i) {
          const uint64_t position = batch[i];
          own[static_cast<size_t>(count)] = i;
          const bool is_own = (static_cast<int64_t>(position >> 32) & (parts - 1)) == part;
          count += is_own && position != kNoPosition ? 1 : 0;
        }
        for (int64_t k = -kAhead; k < count; ++k) {
          if (k + kAhead < count) ranks_.Prefetch(batch[own[static_cast<size_t>(k + kAhead)]]);
          if (k < 0) continue;
          const int64_t i = own[static_cast<size_t>(k)];
          Touch(batch[i], counted, first_order + static_cast<uint64_t>(i));
        }
      }
    });
  }

  // After a batch has been written: its rows are touched, and what is too much goes.
  void TouchAndEvict(const Batch& batch, bool counted, EvictedRows* evicted, ParallelFor& threads) {
    clock_ = NextTime(clock_, now_());
    const uint64_t first_order = next_order_;
    Touch(batch, counted, threads);
    if (Excess() > 0) RemoveExpired(Excess(), threads);
    if (Excess() > 0) {
      std::vector<uint64_t> victims;
      if (eviction_ != Eviction::kCustom) {
        TakeLowest(Excess(), [&](const Rank& rank, uint64_t) { return rank.order >= first_order; }, &victims);
      } else {
        std::unordered_set<uint64_t> own;
        for (int64_t i = 0; i < batch.n; ++i) own.insert(batch[i]);
        TakeLowest(
            Excess(), [&](const Rank&, uint64_t position) { return own.count(position) != 0; }, &victims);
      }
      TakeEarliest(batch, Excess() - static_cast<int64_t>(victims.size()), &victims);
      Remove(victims, evicted, threads);
    }
    // Under kLru the rows of a batch are above all others, and so never among the lowest.
    if (eviction_ == Eviction::kLru || !ranks_.lists_rows()) return;
    for (int64_t i = 0; i < batch.n; ++i) {
      if (i + kAhead < batch.n && batch[i + kAhead] != kNoPosition) ranks_.Prefetch(batch[i + kAhead]);
      if (batch[i] != kNoPosition) ranks_.RankChanged(batch[i]);
    }
  }

  // Removes up to `count` rows that have expired, the oldest first: they take no room from rows that are there, whatever
  // their scores. Nobody is told of them as evicted, for nobody has seen them since they expired.
  void RemoveExpired(int64_t count, ParallelFor& threads) {
    if (!rows_->expiry().ages()) return;
    const uint32_t now = rows_->Now();
    const uint32_t before = RowAges::WrittenBefore(now, rows_->expiry().max_age);
    const auto scan = [&](const auto& visit) { rows_->ForEachVersion(visit); };
    const auto is_there = [&](uint64_t position, uint32_t version) {
      return ranks_.Get(position).order != 0 && rows_->VersionAt(position) == version;
    };
    std::vector<uint64_t> victims;
    for (; count > 0; --count) {
      const uint64_t position = aging_.Next(before, now, rows_->Size(), scan, is_there);
      if (position == kNoPosition) break;
      victims.push_back(position);
      rows_->BeforeScores(&position, 1);
      ranks_.At(position) = {};
    }
    Remove(victims, nullptr, threads);
  }

  // Adds up to `count` rows to `victims`, the lowest first. They have no ranks then.
  template <class Skip>
  void TakeLowest(int64_t count, const Skip& skip, std::vector<uint64_t>* victims) {
    for (; count > 0; --count) {
      const uint64_t position = ranks_.Lowest(rows_->Size(), skip);
      if (position == kNoPosition) return;
      victims->push_back(position);
      rows_->BeforeScores(&position, 1);
      ranks_.At(position) = {};
    }
  }

  // The same with the earliest rows of a batch, which is all there is.
  void TakeEarliest(const Batch& batch, int64_t count, std::vector<uint64_t>* victims) {
    if (count <= 0) return;
    std::unordered_set<uint64_t> seen;
    std::vector<uint64_t> latest_first;
    for (int64_t i = batch.n - 1; i >= 0; --i) {
      if (batch[i] == kNoPosition || ranks_.Get(batch[i]).order == 0) continue;  // it had expired
      if (seen.insert(batch[i]).second) latest_first.push_back(batch[i]);
    }
    for (; count > 0 && !latest_first.empty(); --count, latest_first.pop_back()) {
      victims->push_back(latest_first.back());
      rows_->BeforeScores(&latest_first.back(), 1);
      ranks_.At(latest_first.back()) = {};
    }
  }

  // Removes rows that have no ranks any more.
  void Remove(const std::vector<uint64_t>& victims, EvictedRows* evicted, ParallelFor& threads) {
    const int64_t n = static_cast<int64_t>(victims.size());
    if (n == 0) return;
    Scratch<uint64_t> keys(victims.size());
    rows_->KeysAt(victims.data(), n, keys.data());
    std::exception_ptr error;
    if (evicted != nullptr) {
      try {
        void* evicted_keys = nullptr;
        void* values = nullptr;
        evicted->Allocate(n, &evicted_keys, &values);
        const char* const from = reinterpret_cast<const char*>(keys.data());
        std::copy(from, from + n * SizeOf(key_type()), static_cast<char*>(evicted_keys));
        rows_->GatherColumns(keys.data(), n, {{0, values, dim()}}, nullptr, threads);
      } catch (...) {
        error = std::current_exception();
      }
    }
    rows_->Remove(keys.data(), n, threads);
    evicted_.fetch_add(n, std::memory_order_relaxed);
    if (error != nullptr) std::rethrow_exception(error);
  }

  const std::unique_ptr<ShardedTable> rows_;
  const int64_t max_capacity_;
  const Eviction eviction_;
  const EvictionClock now_;
  std::atomic<int64_t> evicted_{0};

  mutable std::mutex mutex_;
  RankedRows ranks_;
  AgingRows aging_;
  uint64_t clock_ = 0;       // microseconds since 1970, of the last batch
  uint64_t next_order_ = 1;  // of ranks: a row touched later comes later
  uint32_t epoch_ = 0;
};

}  // namespace

std::unique_ptr<Table> BoundTable(std::unique_ptr<ShardedTable> table, int64_t max_capacity,
                                  Eviction eviction, const EvictionClock& clock) {
  ShardedTable* const rows = table.get();
  auto bounded = std::make_unique<BoundedTable>(std::move(table), max_capacity, eviction, clock);
  rows->OnEvicted([ranks = bounded.get()](uint64_t position) { ranks->Forget(position); });
  return bounded;
}

}  // namespace kvtable
