// The table in device memory, over a Device: CudaDevice or, for tests, ThreadsDevice. What runs on the device
// is in the *_kernels.h beside; here is the order in which it runs, and whose memory is whose.
//
// Room
//
// A launch cannot allocate, so before an inserting one there must be room for each key of the batch being
// new. How many rows there are is known on the device only. The host goes by what it knows: every launch that
// changes the number of rows ends with a word in host memory, its sequence number and the rows there were
// then; the keys of the inserting launches since are added. Only where that sum exceeds the room, the host
// waits to learn the exact number.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device_block.h"
#include "device_change_log.h"
#include "eviction/row_ages.h"
#include "evictor.h"
#include "expiry_kernels.h"
#include "export_kernels.h"
#include "find_kernels.h"
#include "insert_kernels.h"
#include "kvtable/device_table.h"
#include "pool_kernels.h"
#include "row_blocks.h"
#include "table/row_layout.h"
#include "values/elements.h"
#include "zero_mark_kernels.h"

namespace kvtable {

template <class Device>
class DeviceTableImpl : public DeviceTable {
 public:
  DeviceTableImpl(Device device, const DeviceTableOptions& options,
                  const EvictionTuning& eviction_tuning = {})
      : device_(std::move(device)),
        options_(options),
        narrow_(options.key_type == KeyType::kInt32),
        value_bytes_(options.dim * SizeOf(options.value_type)),
        ages_(options.expiry),
        evictor_(options.name, options.max_capacity, options.eviction, options.clock, eviction_tuning),
        layout_(CheckedLayout(options)) {
    rows_.row_bytes = layout_.row_bytes;
    rows_.slab_bits = kMinSlabBits;
    while (rows_.slab_bits < kMaxSlabBits && layout_.row_bytes << (rows_.slab_bits + 1) <= kSlabBytes) {
      ++rows_.slab_bits;
    }
    device_.Begin(options_.stream);
    words_ = Allocate(sizeof(Words), MemoryPlace::kDevice, "counters");
    device_.Fill(words_.data(), 0, sizeof(Words));
    report_ = Allocate(sizeof(uint64_t), MemoryPlace::kPinnedHost, "a counter");
    *report_.template as<uint64_t>() = 0;
    rows_.counters = &words_.template as<Words>()->counters;
    initial_ = UploadInitialValue(options_.initializer, &initial_rows_);
    first_slots_ = UploadFirstSlots(layout_);
    GrowIndex(kMinBuckets);
    device_.End();
    if (options.capacity_hint > 0) Reserve(options.capacity_hint, 0, options.stream);
  }

  // Frees nothing that the device still uses.
  ~DeviceTableImpl() override {
    try {
      device_.Wait();
    } catch (const Error&) {  // a device that has failed uses nothing any more
    }
  }

  const DeviceTableOptions& options() const override { return options_; }

  Initializer initializer() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return options_.initializer;
  }
  RowSchema schema() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return {layout_.slots, layout_.generation};
  }

  int64_t Size() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    device_.Wait();
    return RowsAtMost();
  }

  DeviceMemoryUse Memory() const override;

  void Gather(const DeviceKeys& keys, void* out, Missing missing, const void* defaults, int64_t num_defaults,
              bool* found, DeviceStream stream) override;

  using DeviceTable::GatherOrInsert;
  void GatherOrInsert(const DeviceKeys& keys, void* out, const DeviceInsertion& insertion,
                      DeviceStream stream) override;

  void GatherColumns(const DeviceKeys& keys, const std::vector<ColumnOut>& out, bool* found,
                     DeviceStream stream) override;

  void Pointers(const DeviceKeys& keys, void** out, DeviceStream stream) override;

  void PointersOrInsert(const DeviceKeys& keys, void** out, Stamp stamp, bool* inserted,
                        DeviceStream stream) override;

  void GatherPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, void* out,
                    DeviceStream stream) override;

  void GatherPooledOrInsert(const DeviceKeys& keys, const DeviceBags& bags, Stamp stamp, void* out,
                            DeviceStream stream) override;

  void MakeSplits(const int64_t* row_ids, int64_t stride, int64_t n, int64_t bags, int64_t* splits,
                  DeviceStream stream) override;

  void CheckBags(DeviceStream stream) override;

  void SpreadGradient(const DeviceBags& bags, const void* gradient, void* out, DeviceStream stream) override;

  void WeightsGradient(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, const void* pooled,
                       const void* gradient, void* out, DeviceStream stream) override;

  void Contains(const DeviceKeys& keys, bool* out, DeviceStream stream) override;

  void Positions(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) override;

  void GatherStamps(const DeviceKeys& keys, uint32_t* freqs, uint32_t* versions,
                    DeviceStream stream) override;

  void Upsert(const DeviceKeys& keys, const void* values, Stamp stamp, DeviceStream stream) override {
    UpsertColumns(keys, {{0, values, options_.dim}}, stamp, stream);
  }

  void UpsertColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp,
                     DeviceStream stream) override;

  void InsertAndEvict(const DeviceKeys& keys, const void* values, const uint64_t* scores, Stamp stamp,
                      const DeviceEvicted& evicted, DeviceStream stream) override;

  void Accumulate(const DeviceKeys& keys, const void* deltas, bool from_zeros, Stamp stamp,
                  DeviceStream stream) override;

  void Combine(const DeviceKeys& keys, const void* operands, RowOp op, Stamp stamp,
               DeviceStream stream) override;

  void Apply(const DeviceKeys& keys, const void* gradients, const Update& update, const SlotColumns& slots,
             Stamp stamp, DeviceStream stream) override;

  int64_t SkippedUpdates() const override;

  void IncreaseFrequency(const DeviceKeys& keys, const uint32_t* by, DeviceStream stream) override;

  void Zeroed(const DeviceKeys& keys, bool* out, DeviceStream stream) override;

  int64_t ZeroedRows() override;

  void Import(const DeviceKeys& keys, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const RanksIn& ranks, DeviceStream stream) override;

  int64_t EvictedCount() const override;

  int64_t ExpiredCount() const override;

  void Scores(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) override;

  void SetScores(const DeviceKeys& keys, const uint64_t* scores, DeviceStream stream) override;

  void SetEpoch(uint32_t epoch) override {
    std::lock_guard<std::mutex> hold(mutex_);
    evictor_.SetEpoch(epoch);
  }
  uint32_t epoch() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return evictor_.epoch();
  }

  uint32_t Now() const override { return ages_.Now(); }

  void SetStep(uint32_t step) override { ages_.SetStep(step); }

  void EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows, uint64_t* removed,
                  DeviceStream stream) override;

  void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, uint32_t* counts,
                  DeviceStream stream) override;

  int64_t PassLength() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return static_cast<int64_t>(index_.num_buckets) * DeviceBucket::kKeys;
  }

  using DeviceTable::Remove;
  using DeviceTable::RemoveIf;

  void Remove(const DeviceKeys& keys, uint64_t* removed, DeviceStream stream) override;

  void RemoveIf(const RowPredicate& predicate, uint64_t* removed, DeviceStream stream) override;

  void Shrink(int64_t rows, ShrinkOrder order, DeviceStream stream) override;

  void MoveHotRows(int64_t most, DeviceStream stream) override;

  void InDeviceMemory(const DeviceKeys& keys, bool* out, DeviceStream stream) override;

  void Clear(DeviceStream stream) override;

  void Reserve(int64_t rows, int64_t batch, DeviceStream stream) override;

  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, DeviceStream stream) override;

  void SetInitializer(const Initializer& initializer, DeviceStream stream) override;

  std::unique_ptr<DeviceExporter> Export(const RowPredicate& predicate) override {
    return std::make_unique<Exporter>(this, predicate);
  }

  std::unique_ptr<kvtable::Exporter> ExportMoment(const MomentOptions& options, DeviceStream stream) override;

  uint64_t TrackChanges(int64_t max_removed) override;

  bool tracks_changes() const override;

  uint64_t CutChanges() override;

  std::string ChangesLost(uint64_t since) const override;

  void ForgetChanges(uint64_t upto) override;

 private:
  using Block = DeviceBlock<Device>;

  static constexpr uint32_t kLanesOfRow = RowTile<typename Device::Lanes>::kCount;
  static constexpr double kMaxLoad =
      0.7;  // 64 / 5 / 0.7 = 18.3 bytes of index per key; see benchmarks/NOTES.md
  static constexpr double kIndexGrowth = 1.25;  // a rebuild is a stream
  static constexpr int64_t kRowGrowth =
      8;  // by an eighth: rows never move, so growth costs nothing but calls
  static constexpr uint64_t kMinBuckets = 64;
  static constexpr int64_t kSlabBytes = int64_t{1} << 20;
  static constexpr int64_t kMostBlockBytes = int64_t{64} << 20;  // of rows, where a slab is not larger
  static constexpr int64_t kStageBytes = int64_t{8} << 20;
  static constexpr uint64_t kBatchesPerTurn = 8;
  static constexpr uint64_t kLooksPerMove =
      64;  // places of the index that a turn looks at for a row it may move
  static constexpr int kMinSlabBits = 6;
  static constexpr int kMaxSlabBits = 20;
  static constexpr int64_t kMaxRows = int64_t{kPending} - (int64_t{1} << kMaxSlabBits);

  // In device memory.
  struct Words {
    RowCounters counters;
    uint32_t num_new;  // rows that the last inserting launch made
    uint32_t count;    // of whatever is counted
    uint64_t skipped;  // row updates left out
    uint64_t expired;  // rows, by age, norm, frequency or rank
    uint64_t bag_mistake;
  };

  // What writes waits for exports of one moment (device_table_changes.h).
  enum class Does : uint8_t { kRead, kWrite };

  // Holds the table for one operation, and sends what it queues to a stream.
  class Operation {
   public:
    Operation(const DeviceTableImpl* table, DeviceStream stream, Does does = Does::kRead)
        : hold_(table->mutex_), device_(&table->device_) {
      if (does == Does::kWrite) table->AwaitMoments(&hold_);
      device_->Begin(stream);
    }
    ~Operation() { device_->End(); }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

   private:
    std::unique_lock<std::mutex> hold_;
    Device* device_;
  };

  // An operation on a batch: rows of its keys that have expired go first.
  class BatchOperation : public Operation {
   public:
    BatchOperation(DeviceTableImpl* table, const DeviceKeys& keys, DeviceStream stream,
                   Does does = Does::kWrite)
        : Operation(table, stream, table->ages_.expiry().ages() ? Does::kWrite : does),
          ages_(table->ages_),
          time_(table->DropExpired(keys)) {}

    const BatchTime& time() const { return time_; }
    // What rows of the batch are stamped with.
    Stamp StampOf(const Stamp& stamp) const { return ages_.StampAt(time_, stamp); }

   private:
    const RowAges& ages_;
    const BatchTime time_;
  };

  // Which rows are exported.
  struct ExportedRows {
    RowPredicate predicate;
    std::optional<ChangedSince> changed;  // since then; none: whether they have changed or not
  };

  // How far an export has come: all keys with lower hashes were seen.
  struct ExportProgress {
    uint64_t next_hash = 0;
    bool ended = false;
    double share = 0;  // of all hashes, looked at for the last chunk; 0: there was none
  };

  class MomentExporter;

  class Exporter : public DeviceExporter {
   public:
    Exporter(DeviceTableImpl* table, const RowPredicate& predicate) : table_(table), predicate_(predicate) {}

    int64_t max_rows() const override {
      std::lock_guard<std::mutex> hold(table_->mutex_);
      return progress_.ended ? 0 : table_->RowsAtMost();
    }
    int64_t Next(int64_t capacity, const Buffers& out, DeviceStream stream) override {
      return table_->ExportNext({predicate_, std::nullopt}, &progress_, capacity, out, stream);
    }

   private:
    DeviceTableImpl* table_;
    RowPredicate predicate_;
    ExportProgress progress_;
  };

  // Throws unless rows have the column that is meant.
  template <class Column>
  void CheckColumn(const Column& column) const {
    layout_.At(column.column, column.width, column.generation);
  }

  static uint64_t Count(int64_t n) { return static_cast<uint64_t>(n); }

  static RowLayout CheckedLayout(const DeviceTableOptions& options) {
    constexpr int64_t kMaxDim = int64_t{1} << 24;
    if (options.dim <= 0 || options.dim > kMaxDim) {
      throw Error(ErrorCode::kInvalidArgument, "Table '" + options.name + "' has dim " +
                                                   std::to_string(options.dim) + "; expected 1 to " +
                                                   std::to_string(kMaxDim) + ".");
    }
    return RowLayout(options.value_type, options.dim, options.slots);
  }

  // ---- Memory

  [[noreturn]] void ThrowNoMemory(size_t bytes, const char* what) const;

  Block Allocate(size_t bytes, MemoryPlace place, const char* what) {
    Block block(&device_, bytes, place);
    if (block.data() == nullptr) ThrowNoMemory(bytes, what);
    return block;
  }

  // What new rows' values are; `ready` takes those that are not drawn.
  DeviceInitialValue UploadInitialValue(const Initializer& from, Block* ready);

  // A row whose slots are those of new rows, but for those that copy the value.
  Block UploadFirstSlots(const RowLayout& layout);

  static uint64_t BucketsFor(int64_t rows) {
    return static_cast<uint64_t>(static_cast<double>(rows) / (DeviceBucket::kKeys * kMaxLoad)) + 1;
  }
  static int64_t MostKeys(uint64_t buckets) {
    return static_cast<int64_t>(static_cast<double>(buckets) * DeviceBucket::kKeys * kMaxLoad);
  }

  void GrowIndex(uint64_t buckets);

  // Makes room for this many rows in all.
  void AddRows(int64_t rows);

  // Slabs of this size that device memory may have.
  int64_t DeviceSlabsFor(int64_t slab_bytes) const {
    const int64_t left = options_.max_hbm - device_rows_.BytesOfFitting(slab_bytes);
    return PlacesIn(device_rows_, slab_bytes) + std::max(int64_t{0}, left / slab_bytes);
  }
  static int64_t PlacesIn(const RowBlocks<Device>& blocks, int64_t slab_bytes) {
    return static_cast<int64_t>(blocks.Places(slab_bytes).size());
  }
  bool HasHostRows() const { return static_cast<int64_t>(slabs_.size()) > device_slabs_; }

  // Blocks that rows need beside those they have.
  struct RowRoom {
    std::vector<Block> in_device;
    std::vector<Block> on_host;
  };

  RowRoom MakeRowRoom(int64_t device_slabs, int64_t host_slabs, int64_t slab_bytes);
  void TakeRowRoom(RowRoom room) {
    device_rows_.Add(std::move(room.in_device));
    host_rows_.Add(std::move(room.on_host));
  }

  // In blocks that are small beside a large table, so that one can go when the rows become narrower.
  std::vector<Block> AllocateSlabs(int64_t slabs, int64_t slab_bytes, MemoryPlace place);

  // Gives the slabs their places.
  void PlaceSlabs(int64_t slab_bytes);

  // Gives all rows another layout. All memory it takes, it takes first: what wider rows need beside the
  // memory there is, and some to stage rows in (relayout_kernels.h).
  void ChangeLayout(RowLayout to);

  // Writes the columns of rows that lie in `stage` as they were.
  void MoveColumns(const RowLayout& from, uint64_t first, uint64_t n, const char* stage);

  // To whole words, for ChangeElement.
  static size_t Padded(int64_t bytes) { return (Count(bytes) + 3) / 4 * 4; }

  // Rows there can be, by what is known without waiting; exact after Wait.
  int64_t RowsAtMost() const;

  bool HasRoomFor(int64_t rows) const {
    return rows <= row_capacity_ && rows <= MostKeys(index_.num_buckets);
  }

  void EnsureRoom(const DeviceKeys& keys);

  void GrowTo(int64_t rows, bool generously);

  int64_t CountMissing(const DeviceKeys& keys);

  int64_t ReadCount();

  void EnsureRoomToFree(int64_t rows);

  // ---- Scratch memory: arrays of a batch's length, until the next operation

  void PrepareScratch(int64_t n);
  Slot* new_slots() const { return scratch_.template as<Slot>(); }
  uint32_t* numbers() const { return reinterpret_cast<uint32_t*>(new_slots() + scratch_keys_); }
  uint32_t* new_keys() const { return numbers() + scratch_keys_; }
  bool* flags() const { return reinterpret_cast<bool*>(new_keys() + scratch_keys_); }

  static uint64_t ClaimsFor(int64_t n) { return std::min(2 * Count(n), uint64_t{UINT32_MAX}) + 1; }
  void PrepareClaims(int64_t n);

  // Scratch for sorting as large a batch as there is scratch memory for.
  void PrepareSort();

  // Makes room for the marks of all rows.
  void PrepareMarks();
  DeviceZeroMarks Marks() const { return {marks_.template as<uint32_t>(), marks_.bytes() * 8}; }

  // ---- Steps of operations

  BatchKeys Batch(const DeviceKeys& keys) const { return {keys.keys, Count(keys.n), narrow_}; }

  template <class... Addresses>
  int Alignment(uint64_t bytes, const Addresses*... addresses) const {
    uint64_t bits = bytes | Count(layout_.row_bytes);
    ((bits |= reinterpret_cast<uintptr_t>(addresses)), ...);
    return AlignmentOf(bits);
  }

  void Locate(const DeviceKeys& keys, uint32_t* out, void** pointers, bool* found, uint32_t* freqs,
              uint32_t* versions);

  void GatherColumn(const DeviceKeys& keys, const uint32_t* located, int64_t offset, int64_t bytes, void* out,
                    const MissingValue& missing, bool* found);

  void CopyOut(const uint32_t* rows, int64_t n, const uint32_t* limit, int64_t offset, int64_t bytes,
               void* out);

  BagSplits Splits(const DeviceBags& bags, int64_t ids) const {
    return {bags.splits, Count(bags.bags), ids, &words_.template as<Words>()->bag_mistake};
  }

  void CheckPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing) const;

  // Throws on tables of integers before anything is done.
  void RequireFloating() const {
    VisitValueType(options_.value_type, [](auto) {});
  }

  // The rows of keys that have been located.
  template <class T>
  IdRows<T> Ids(const DeviceKeys& keys, Missing missing) const {
    return {Batch(keys), rows_, numbers(), {missing, initial_, nullptr, 0}};
  }

  void Pool(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, void* out);

  // Finds or makes the row of each key; numbers() are their rows then. A new row's slots that copy the value
  // are the caller's to see to.
  void Insert(const DeviceKeys& keys, FirstValue first_value, bool* inserted, const AdmissionDraw& admission);

  // Which missing keys an operation may make rows for. Those that it may not for are kNoRow in numbers() then.
  AdmissionDraw MayInsert(double probability = 1.0, uint64_t seed = 0) const {
    return AdmissionDraw(probability, seed, options_.padding_key);
  }
  AdmissionDraw MayInsert(Stamp stamp) const { return MayInsert(stamp.existing_only ? 0.0 : 1.0, 0); }

  // ---- Hot rows

  int64_t DeviceRowCount() const { return device_slabs_ << rows_.slab_bits; }

  void PrepareToMove(int64_t most);

  // Where so many slabs are to be in device memory.
  void PrepareToMoveInTurn(int64_t device_slabs) {
    PrepareToMove(std::min(options_.move_hot_rows, device_slabs << rows_.slab_bits));
  }

  void MoveHotRowsInTurn();

  void MoveHotRowsOf(uint64_t begin, uint64_t buckets, int64_t most_rows);

  void CountRows(int64_t keys, uint64_t* removed = nullptr, bool by_policy = false);

  // ---- What changed, and exports of one moment

  // Until no export has rows to read that must not change.
  void AwaitMoments(std::unique_lock<std::mutex>* hold) const;
  // The rows in numbers() are written by this operation, scores and stamps included.
  void NoteWrites(int64_t n);
  void ForgetAllChanges(ChangeLog::Why why);
  void CheckTracksChanges() const;

  // ---- Expiry

  BatchTime DropExpired(const DeviceKeys& keys);
  // From the cursor on, which it moves along.
  IndexSlice NextSlice(PassCursor* cursor, int64_t most_rows) const;

  void CopyValueToSlots(int64_t n);

  void InsertStamped(const DeviceKeys& keys, Stamp stamp, bool* inserted, const AdmissionDraw& admission);

  void WriteStamped(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp);

  // ---- Bounded tables (evictor.h)

  // All that the end of a batch needs, before it begins.
  void PrepareEviction(int64_t n);

  // The end of a batch whose rows are in numbers().
  void TouchAndEvict(const DeviceKeys& keys, bool counted, const uint64_t* scores,
                     const DeviceEvicted* evicted);

  // What a batch evicts. `imported`: its rows stand by their scores.
  void Evict(const DeviceKeys& keys, bool imported, const DeviceEvicted* evicted);

  void Unmark(int64_t n, const bool* only);

  void MarkZeros(int64_t n, const BatchClaims& claims, const void* values);

  // The batch whose rows are in numbers(), equal rows side by side. In memory that new keys no longer need.
  BatchGradients SortedByRow(const DeviceKeys& keys, const void* gradients);

  // Sums of rows that occur very often in a batch: log2 of a chunk's positions (0: no chunks), memory, and the launch.
  static int ChunkBitsFor(int64_t n);
  void PrepareChunkSums(int64_t n);
  void SumChunks(BatchGradients* batch);

  void StampRows(int64_t n, const bool* only, Stamp stamp);

  // Claims for a batch whose rows are in numbers().
  BatchClaims Claim(const DeviceKeys& keys, bool first);

  // Returns the claims of the last occurrences.
  BatchClaims WriteColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in,
                           const AdmissionDraw& admission);

  bool CopiesValue() const {
    return std::any_of(layout_.slots.begin(), layout_.slots.end(),
                       [](const SlotSpec& slot) { return slot.init == SlotSpec::Init::kCopyValue; });
  }

  void Assign(int64_t n, const BatchClaims& claims, const bool* only, const RowLayout::Column& to,
              const void* in);

  int64_t ExportNext(const ExportedRows& wanted, ExportProgress* progress, int64_t capacity,
                     const DeviceExporter::Buffers& out, DeviceStream stream);
  // The rows of the next range of hashes, which may be none.
  int64_t ExportRange(const ExportedRows& wanted, ExportProgress* progress, int64_t capacity,
                      const DeviceExporter::Buffers& out);

  // Lists the rows that are meant and whose keys have these hashes, in numbers(), if they are no more than
  // `room`; and returns how many they are.
  int64_t ListRows(const ExportedRows& wanted, uint64_t first_hash, uint64_t last_hash, int64_t room,
                   const DeviceExporter::Buffers& out);

  // Declared first, so that it outlives the memory.
  mutable Device device_;
  DeviceTableOptions options_;  // slots and initializer as they are now, which mutex_ guards
  const bool narrow_;
  const int64_t value_bytes_;

  RowAges ages_;

  Evictor<Device> evictor_;  // guarded by mutex_, its policy aside
  DeviceChangeLog<Device> changes_;
  std::vector<MomentExporter*> moments_;  // that hold up who writes
  mutable std::condition_variable moment_read_;
  bool may_exceed_ = false;  // the present batch may leave more rows than a bounded table is to have

  mutable std::mutex mutex_;  // guards all below
  RowLayout layout_;
  DeviceInitialValue initial_;
  Block initial_rows_;
  Block first_slots_;  // a row; its value means nothing

  Block buckets_;
  DeviceIndex index_;

  RowBlocks<Device> device_rows_;
  RowBlocks<Device> host_rows_;
  int64_t device_slabs_ = 0;  // the first of slabs_, which are in device memory
  std::vector<Block> stamp_blocks_;
  std::vector<DeviceSlab> slabs_;  // what slab_table_ holds
  Block slab_table_;
  Block free_rows_;
  DeviceRows rows_;
  int64_t row_capacity_ = 0;
  int64_t free_at_most_ = 0;

  Block words_;
  Block report_;  // uint64_t in host memory; see CountRowsBody
  struct Queued {
    uint32_t sequence;
    int64_t keys;
  };
  mutable std::deque<Queued> queued_;  // inserting launches that had not reported
  mutable int64_t queued_keys_ = 0;    // their keys in all
  uint32_t sequence_ = 0;

  Block scratch_;
  int64_t scratch_keys_ = 0;
  Block claims_;
  Block sort_scratch_;
  Block chunk_sums_;
  int64_t sortable_keys_ = 0;
  Block working_;  // see WorkingMemory
  Block marks_;    // of zero rows; none until one may be
  Block selection_;
  Block moving_;  // HotRows, and two lists of most_moving_ slots
  int64_t most_moving_ = 0;
  uint64_t batches_ = 0;  // that inserted or wrote
  uint64_t hand_ = 0;     // the bucket where the next turn begins
};

}  // namespace kvtable

// The methods, by subject.
#include "device_table_changes.h"
#include "device_table_expiry.h"
#include "device_table_export.h"
#include "device_table_hot_rows.h"
#include "device_table_pooling.h"
#include "device_table_reads.h"
#include "device_table_removal.h"
#include "device_table_room.h"
#include "device_table_slots.h"
#include "device_table_updates.h"
#include "device_table_writes.h"
