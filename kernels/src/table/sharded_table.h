// The table on the CPU: shards, batches over them, and who may do what when.
//
// Concurrency
//
// A key belongs to one shard, by the high bits of its hash. A shard's index, rows, stamps and layout are
// guarded by the shard's readers-writer lock, and by nothing else:
//   - who holds it shared may read them; rows don't change under him, so every row he sees is whole;
//   - who holds it exclusively may change them, and leaves every row whole before he lets go, also by an
//     exception: whatever may fail (memory) happens before the first change of a row.
// Locks and their order:
//   1. `slots_lock_`: EnsureSlots has it exclusively for the whole of it, so that there is one at a time. Who
//      writes columns (Apply, UpsertColumns, Import) has it shared for the whole batch, so that all shards have
//      the columns that it found, or it is refused before it has changed anything. Taken before any other.
//   2. Shard locks (shard_lock.h). A lookup takes, of the shards that a block of its keys touches, those that no
//      writer has, all at once (read_seats.h); it puts off the keys of the others, and waits for a shard only
//      when these are all that is left of its range, and it has none. A writer holds one exclusive lock and no
//      other shard's. So nobody waits with a shard in hand, but for a cut (4): nobody waits in a circle, and who
//      holds a shard for long holds up those who want this shard, and nobody else.
//   3. `state_mutex_`: guards the pointers to the current layout and initializer. A leaf: nothing is taken
//      under it.
//   4. `changes_mutex_`: guards the change log. Taken after `slots_lock_` and before shard locks; a cut has it with
//      the exclusive locks of all shards, taken in ascending order, for as long as it takes to exchange a pointer in
//      each. A bounded table's mutex comes before all of these.
// Nobody calls ParallelFor::Run with a shard lock in hand: the lent threads may be busy waiting for that very
// lock. With `slots_lock_` it is safe: no task takes it, and Run waits for nothing but tasks that have begun.
//
// EnsureSlots changes all shards or none. It takes the memory for the rows of all of them first, shard by
// shard; a shard that gets more rows meanwhile takes memory for them in both layouts. Then nothing can fail.
//
// A lookup locks a block of some thousand keys at a time, a write one shard's share of its batch, or less where
// lookups wait for that shard: then it lets them in every few hundred keys. Batches write first what nobody else
// is writing, so that those that begin together don't queue up one behind the other. So a batch is not one
// transaction: another thread's write may come between two blocks, and one for which memory runs out has
// written other shards before. Each row is.
//
// What changes is told to the shard's RowWatch, where it has one, under the shard's lock and before the first byte
// changes: the change log, and exports of one moment, which copy the row aside if it has not come yet. A batch
// waits for room there before it takes any lock. Clear and EnsureSlots, which change all rows, wait for these
// exports to end before they take any lock (MomentGate), and make the change log start anew.
//
// A row's number stays the same for life, and its address until EnsureSlots gives its shard another layout. Of a table
// that spills, rows have addresses while they are in memory only (spill/row_cache.h): who holds a shard exclusively
// brings in those that he is going to write; who holds it shared reads others from the file. Both may wait for the disk
// with the lock in hand, which waits for nobody.
// Nothing outside a lock remembers the address. A number may be remembered (RowsOut::positions), and proves
// nothing: after a removal the row may be free or another key's.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/always_inline.h"
#include "eviction/rank.h"
#include "eviction/row_ages.h"
#include "kvtable/table.h"
#include "table/change_log.h"
#include "table/moment_gate.h"
#include "table/row_layout.h"
#include "table/row_store.h"
#include "table/rows_in_place.h"
#include "table/shard.h"
#include "table/shard_groups.h"
#include "training/row_updater.h"
#include "values/initial_value.h"

namespace kvtable {

inline constexpr int64_t kAhead = 16;  // searches begun before the one being finished; buckets twice as far

class RowsWriter;  // in rows_writer.h

class ShardedTable : public Table, public RowsInPlace {
 public:
  explicit ShardedTable(const TableOptions& options);

  KeyType key_type() const override { return key_type_; }
  ValueType value_type() const override { return value_type_; }
  int64_t dim() const override { return dim_; }
  Initializer initializer() const override { return initial()->initializer(); }
  RowSchema schema() const override {
    const std::shared_ptr<const RowLayout> now = layout();
    return {now->slots, now->generation};
  }
  uint64_t generation() const override { return generation_.load(std::memory_order_acquire); }

  int64_t Size() const override {
    int64_t size = 0;
    for (const auto& shard : shards_) size += shard->size.load(std::memory_order_relaxed);
    return size;
  }

  MemoryUse Memory() const override;
  int MaxProbeLength() const override;
  void Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
              int64_t num_defaults, bool* found, ParallelFor& threads) const override;
  void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                      ParallelFor& threads) override;
  bool ReadInPlace(const void* keys, int64_t n, const Insertion* insertion, Missing missing,
                   const Read& read) override;
  void GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                     ParallelFor& threads) const override;
  void Contains(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override;
  void GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                    ParallelFor& threads) const override;
  void Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const override;
  void KeysAt(const uint64_t* positions, int64_t n, void* keys) const override;
  void Upsert(const void* keys, int64_t n, const void* values, Stamp stamp, ParallelFor& threads) override;
  void UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                     ParallelFor& threads) override;
  void Accumulate(const void* keys, int64_t n, const void* deltas, bool from_zeros, Stamp stamp,
                  ParallelFor& threads) override;
  void Combine(const void* keys, int64_t n, const void* operands, RowOp op, Stamp stamp,
               ParallelFor& threads) override;
  ApplyCounts Apply(const void* keys, const uint64_t* positions, int64_t n, const GradientsIn& gradients,
                    const Update& update, const SlotColumns& slots, Stamp stamp,
                    ParallelFor& threads) override;
  void Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override;
  int64_t ZeroedRows() const override;
  int64_t SkippedUpdates() const override { return skipped_updates_.load(std::memory_order_relaxed); }
  void IncreaseFrequency(const void* keys, int64_t n, const uint32_t* by, ParallelFor& threads) override;
  LookupCounts lookup_counts() const override {
    return {looked_up_.load(std::memory_order_relaxed), born_.load(std::memory_order_relaxed),
            held_back_.load(std::memory_order_relaxed)};
  }
  int64_t Remove(const void* keys, int64_t n, ParallelFor& threads) override;
  void Clear() override;
  void Reserve(int64_t rows, ParallelFor& threads) override;
  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) override;
  std::unique_ptr<Exporter> Export() const override;
  std::unique_ptr<Exporter> ExportMoment(const MomentOptions& options) override;
  uint64_t TrackChanges(int64_t max_removed) override;
  bool tracks_changes() const override;
  uint64_t CutChanges() override;
  std::string ChangesLost(uint64_t since) const override;
  void ForgetChanges(uint64_t upto) override;
  void Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const RanksIn&, ParallelFor& threads) override;

  int64_t max_capacity() const override { return 0; }
  Eviction eviction() const override { return Eviction::kLru; }
  int64_t EvictedCount() const override { return 0; }
  int64_t ExpiredCount() const override { return expired_.load(std::memory_order_relaxed); }
  void Scores(const void*, int64_t n, uint64_t* scores, ParallelFor&) const override {
    std::memset(scores, 0, static_cast<size_t>(n) * sizeof(uint64_t));
  }
  int64_t SetScores(const void*, int64_t, const uint64_t*, ParallelFor&) override {
    throw Error(ErrorCode::kFailedPrecondition,
                "The table keeps no scores, for it is not bounded. Make it with a max_capacity.");
  }
  void SetEpoch(uint32_t) override {
    throw Error(ErrorCode::kFailedPrecondition,
                "The table has no epochs, for it is not bounded. Make it with a max_capacity.");
  }
  uint32_t epoch() const override { return 0; }

  const Expiry& expiry() const override { return ages_.expiry(); }
  uint32_t Now() const override { return ages_.Now(); }
  void SetStep(uint32_t step) override { ages_.SetStep(step); }
  int64_t EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                     ParallelFor& threads) override;
  void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, int64_t* counts,
                  ParallelFor& threads) const override;
  int64_t PassLength() const override;

  // Has evict_row(position) called for each row that goes by age, norm, frequency or rank, under its shard's
  // lock. For who keeps something beside rows; before the table is used.
  void OnEvicted(std::function<void(uint64_t)> evict_row) { on_evicted_ = std::move(evict_row); }
  // ---- For a table that keeps scores of this one's rows, and lets in one batch at a time

  struct Ranks {
    std::function<Rank(uint64_t)> rank_of;  // of the row at a position; called by who holds `batches`
    std::mutex* batches = nullptr;
  };
  void SetRanks(Ranks ranks) { ranks_ = std::move(ranks); }
  // Says of rows that their scores are about to change, or to be lost. Positions may be kNoPosition.
  void BeforeScores(const uint64_t* positions, int64_t n);
  // visit(position, version) for each row, also of those that have expired.
  template <class Visit>
  void ForEachVersion(const Visit& visit) const {
    for (size_t s = 0; s < shards_.size(); ++s) {
      const Shard& shard = *shards_[s];
      std::shared_lock<ShardLock> hold(shard.lock);
      shard.rows.ForEachLive(0, shard.rows.high_water(), [&](uint32_t row) {
        visit(uint64_t{s} << 32 | row, shard.rows.StampOf(row)->version);
        return true;
      });
    }
  }
  // Of a position that has, or had, a row.
  uint32_t VersionAt(uint64_t position) const {
    const Shard& shard = *shards_[position >> 32];
    std::shared_lock<ShardLock> hold(shard.lock);
    return shard.rows.StampOf(static_cast<uint32_t>(position))->version;
  }
  // For lookups that insert what is not there, of keys that are: see LookupCounts.
  void CountLookedUp(int64_t keys) { looked_up_.fetch_add(keys, std::memory_order_relaxed); }
  // How often somebody had to wait for a shard (ShardLock::waits).
  int64_t LockWaits() const;
  bool is_watched() const { return watched_.load(std::memory_order_relaxed); }
  // Before `batches` is taken.
  void AwaitRoomAside() { gate_.AwaitRoom(); }
  MomentGate* gate() { return &gate_; }

  void SetInitializer(const Initializer& initializer) override {
    auto made = std::make_shared<const InitialValue>(initializer, value_type_, dim_, padding_key_);
    std::lock_guard<std::mutex> hold(state_mutex_);
    initial_ = std::move(made);
  }

 private:
  friend class PartsReader;
  friend class TableExporter;
  friend class MomentExporter;

  std::shared_ptr<const RowLayout> layout() const {
    std::lock_guard<std::mutex> hold(state_mutex_);
    return layout_;
  }
  std::shared_ptr<const InitialValue> initial() const {
    std::lock_guard<std::mutex> hold(state_mutex_);
    return initial_;
  }

  // Throws unless the rows of a shard have the column that is meant.
  template <class Column>
  static const RowLayout::Column& CheckColumn(const Shard& shard, const Column& column) {
    return shard.layout->At(column.column, column.width, column.generation);
  }

  std::shared_ptr<SharedPages> MakeRowPages() const;
  // In read_range.h.
  // Looks up keys[begin, end) block by block: check(shard) once for each shard of a block, which may throw;
  // locate(i, number of shard, shard, row) -> pointer for each key that has a row; then prefetch(shard, pointer)
  // and some steps later visit(i, shard, pointer), with null for a missing key: one without a row, or whose row
  // has expired, or, with `only_memory`, is in the file. Keys whose shards are being written come last. Ends early
  // where go_on(i), asked after each block with the key that comes next, is false. Returns where it ended: all keys
  // before that have been visited.
  template <class Key, class GoOn, class Check, class LocateRow, class Prefetch, class Visit>
  int64_t ReadRange(const BatchTime& time, const Key* keys, int64_t begin, int64_t end, const GoOn& go_on,
                    const Check& check, const LocateRow& locate, const Prefetch& prefetch, const Visit& visit,
                    bool only_memory = false) const;
  // One block of it, the keys which[0, count) of these places, with the shards that they need in hand. Of tables that
  // spill with `reads`, for rows in the file.
  template <class Which, class Places, class LocateRow, class Prefetch, class Visit>
  __attribute__((noinline)) static void ReadHeld(const BatchTime& time, const Which& which, int64_t count,
                                                 const Places& places, const LocateRow& locate,
                                                 const Prefetch& prefetch, const Visit& visit,
                                                 FileReads* reads = nullptr, bool only_memory = false);
  // Of a table that spills: makes the row numbers among what was found addresses, of rows in memory or of copies in
  // `reads`; with `only_memory` null for rows in the file.
  template <class Places>
  static void FindSpilled(const Places& places, uintptr_t* found, int64_t count, bool only_memory,
                          FileReads* reads);
  // The same for all keys of a batch, shared out among the threads.
  template <class Check, class LocateRow, class Prefetch, class Visit>
  void ReadBatch(const void* keys, int64_t n, ParallelFor& threads, const Check& check,
                 const LocateRow& locate, const Prefetch& prefetch, const Visit& visit) const;
  // Copies the values of keys[begin, end) to their places, and calls missed(i) for the keys that are not
  // there; with `only_memory`, also for those whose rows are in the file. `go_on` and what is returned are as of
  // ReadRange.
  template <class Key, class GoOn, class Missed>
  int64_t ReadValues(const BatchTime& time, const Key* keys, int64_t begin, int64_t end, const RowsOut& out,
                     bool* found, const GoOn& go_on, const Missed& missed, bool only_memory = false) const;

  // In write_groups.h.
  // Sorts keys by shard, and calls write(group) for each, on the threads, beginning with those whose shards nobody is
  // writing.
  template <class Key, class Write>
  void ForGroups(ShardGroups<Key>& groups, ParallelFor& threads, const Write& write);
  // Finds or makes the row of each key of a group, under the shard's exclusive lock: check(shard) first,
  // which may throw; prefetch_input(position) some steps ahead; write(shard, row, key, position, is_new) in
  // the order of the batch. With `existing_only` keys without a row are left out, and the padding key is always. A row that has
  // expired is none: it is made anew.
  // The shard is told of each row before it is written; with kOnlyNew, of new ones, for others are only read.
  // Lets lookups in that wait for the shard, now and then, but with kOnlyNew: then check(shard) comes again.
  template <bool kOnlyNew, class Check, class PrefetchInput, class Write>
  void WriteGroup(const BatchTime& time, const ShardGroup& group, bool existing_only, const Check& check,
                  const PrefetchInput& prefetch_input, const Write& write);
  // Its first keys, under one lock: how many it came to.
  template <bool kOnlyNew, class Check, class PrefetchInput, class Write>
  int64_t WriteTurn(const BatchTime& time, const ShardGroup& group, bool existing_only, const Check& check,
                    const PrefetchInput& prefetch_input, const Write& write);
  // The same with the lock in hand; of a table that spills, the rows of the group are in memory.
  template <bool kOnlyNew, class PrefetchInput, class Write>
  int64_t WriteRows(const BatchTime& time, Shard* shard, const ShardGroup& group, bool existing_only,
                    const PrefetchInput& prefetch_input, const Write& write);
  // Has the rows of these keys in memory, and places for new ones where there may be any.
  static void BringIn(Shard* shard, const ShardGroup& group, bool existing_only);
  template <class Check, class PrefetchInput, class Write>
  void WriteBatch(const BatchTime& time, const void* keys, int64_t n, bool existing_only,
                  ParallelFor& threads, const Check& check, const PrefetchInput& prefetch_input,
                  const Write& write);
  // Gives the key of a row that has expired another, which may be the same memory. Throws std::bad_alloc; the
  // old row may have gone then.
  uint32_t Renew(int shard_number, uint64_t key, uint32_t row);

  // prepare(shard, n) for each shard, which may throw; then the named columns of each row, and
  // finish(shard, row, i).
  template <class Prepare, class Finish>
  void WriteColumns(const BatchTime& time, const void* keys, int64_t n, const std::vector<ColumnIn>& in,
                    bool existing_only, ParallelFor& threads, const Prepare& prepare, const Finish& finish);
  bool IsZero(const char* value) const;
  // The keys of one shard in a training step; their positions are those of their gradients. `offsets` are those of
  // value and slots in a row.
  ApplyCounts ApplyGroup(const BatchTime& time, const ShardGroup& group, const char* gradients,
                         const Update& update, const RowUpdater& updater, const std::vector<int64_t>& offsets,
                         Stamp stamp, const InitialValue& init);
  // Keeps the keys of `misses` that are admitted, and writes what the others give. `admitted` may be null; where
  // it is not, first[i] is the frequency that a row of key i starts from.
  template <class Key>
  int64_t KeepAdmitted(const Key* keys, uint32_t* misses, int64_t count, const RowsOut& out,
                       const RowsWriter& rows, const Insertion& insertion, const InitialValue& init,
                       AdmittedKeys* admitted, uint32_t* first, ParallelFor& threads) const;
  // The second half of GatherOrInsert: keys that the lookup missed. `first` may be null.
  void InsertMissed(const BatchTime& time, const ShardGroup& group, const InitialValue& init, Stamp stamp,
                    const RowsOut& out, const RowsWriter& rows, const uint32_t* first, bool* inserted);
  // The rows [begin, end) of a shard, those there are: how many of them went.
  int64_t EvictRows(const RowTest& test, int shard_number, uint32_t begin, uint32_t end);

  // In copy_picks.h.
  // Copies those of the picked rows (shard << 32 | row) that are live and for which take(shard, row) holds, which
  // is called under the shard's shared lock. Returns how many.
  template <class Take>
  int64_t CopyPicked(const uint64_t* picks, int64_t count, const Exporter::Buffers& out, ParallelFor& threads,
                     const Take& take) const;
  template <class Key, class Take>
  int64_t CopyPickedRange(const uint64_t* picks, int64_t count, int64_t at, const Exporter::Buffers& out,
                          const Take& take) const;

  // In table_changes.cc.
  std::unique_lock<std::mutex> HoldBatches(bool wanted) const {
    return wanted && ranks_.batches != nullptr ? std::unique_lock<std::mutex>(*ranks_.batches)
                                               : std::unique_lock<std::mutex>();
  }
  // A table around this one does it before it takes its mutex.
  void AwaitOwnRoomAside() {
    if (ranks_.batches == nullptr) gate_.AwaitRoom();
  }
  static void CheckNotGivenUp(const Moment& moment);
  // Ends a version, where `cut`, and begins the moment of `shards`, where there are any, with all shards' locks in
  // hand. Returns the version's number.
  uint64_t Cut(bool cut, const std::vector<std::unique_ptr<ShardMoment>>& shards,
               std::optional<uint64_t> since);
  void Unwatch(const std::vector<std::unique_ptr<ShardMoment>>& shards) noexcept;
  // What a shard's log goes on with where all rows change at once. Under its lock.
  void StartLogAnew(Shard* shard, std::shared_ptr<ShardChanges> empty) noexcept;
  std::vector<std::shared_ptr<ShardChanges>> EmptyLogs() const;
  void ForgetAllChanges(ChangeLog::Why why) noexcept;

  const KeyType key_type_;
  const ValueType value_type_;
  const int64_t dim_;
  const int64_t value_bytes_;
  const bool huge_pages_;
  const std::optional<uint64_t> padding_key_;
  int shard_bits_ = 0;
  mutable ReadSeats seats_;
  std::shared_ptr<EqualSlots> index_slots_;
  std::shared_ptr<SpillFile> spill_;  // null: all rows are in memory
  std::vector<std::unique_ptr<Shard>> shards_;

  RwSpinlock slots_lock_;
  mutable std::mutex state_mutex_;
  std::shared_ptr<const RowLayout> layout_;  // what all shards have, or had until EnsureSlots began
  std::shared_ptr<const InitialValue> initial_;
  std::shared_ptr<SharedPages> row_pages_;  // of the rows of all shards
  std::atomic<uint64_t> generation_{1};     // of layout_
  std::atomic<int64_t> skipped_updates_{0};
  std::atomic<int64_t> looked_up_{0};  // see LookupCounts
  std::atomic<int64_t> born_{0};
  std::atomic<int64_t> held_back_{0};
  RowAges ages_;
  std::function<void(uint64_t)> on_evicted_;
  std::atomic<int64_t> expired_{0};  // by age, norm, frequency or rank

  Ranks ranks_;
  MomentGate gate_;
  std::atomic<bool> watched_{false};  // whether a shard ever had a RowWatch
  mutable std::mutex changes_mutex_;
  ChangeLog log_;
};

}  // namespace kvtable
