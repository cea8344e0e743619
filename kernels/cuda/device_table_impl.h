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
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check_batch.h"
#include "device_block.h"
#include "elements.h"
#include "erase_kernels.h"
#include "evictor.h"
#include "export_kernels.h"
#include "find_kernels.h"
#include "gradient_kernels.h"
#include "hot_rows_kernels.h"
#include "initial_value.h"
#include "insert_kernels.h"
#include "kvtable/device_table.h"
#include "pool_kernels.h"
#include "relayout_kernels.h"
#include "row_blocks.h"
#include "row_layout.h"
#include "shrink_kernels.h"
#include "splits_kernels.h"
#include "update_rows.h"
#include "write_kernels.h"
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
  ~DeviceTableImpl() override { device_.Wait(); }

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

  DeviceMemoryUse Memory() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    device_.Wait();
    DeviceMemoryUse use;
    use.rows = RowsAtMost();
    use.row_bytes = use.rows * layout_.row_bytes;
    use.index_bytes = static_cast<int64_t>(buckets_.bytes());
    use.column_bytes = static_cast<int64_t>(free_rows_.bytes());
    use.column_bytes += static_cast<int64_t>(marks_.bytes()) + evictor_.column_bytes();
    for (const Block& block : stamp_blocks_) use.column_bytes += static_cast<int64_t>(block.bytes());
    use.host_bytes = host_rows_.bytes();
    use.slack_bytes = device_rows_.bytes() + use.host_bytes - use.row_bytes;
    use.scratch_bytes = static_cast<int64_t>(scratch_.bytes() + claims_.bytes() + sort_scratch_.bytes() +
                                             working_.bytes() + moving_.bytes()) +
                        evictor_.scratch_bytes();
    return use;
  }

  void Gather(const DeviceKeys& keys, void* out, Missing missing, const void* defaults, int64_t num_defaults,
              bool* found, DeviceStream stream) override {
    CheckBatch(keys.n);
    if (missing == Missing::kDefault && keys.n > 0 && (defaults == nullptr || num_defaults <= 0)) {
      throw Error(ErrorCode::kInvalidArgument, "Gather with Missing::kDefault got " +
                                                   std::to_string(num_defaults) +
                                                   " default rows; expected at least one.");
    }
    const Operation operation(this, stream);
    GatherColumn(keys, nullptr, 0, value_bytes_, out,
                 {missing, initial_, static_cast<const char*>(defaults), static_cast<uint64_t>(num_defaults)},
                 found);
  }

  using DeviceTable::GatherOrInsert;
  void GatherOrInsert(const DeviceKeys& keys, void* out, const DeviceInsertion& insertion,
                      DeviceStream stream) override {
    if (!(insertion.admission >= 0.0 && insertion.admission <= 1.0)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "Table '" + options_.name + "' got an admission probability of " +
                      std::to_string(insertion.admission) + "; expected 0.0 to 1.0.");
    }
    const Operation operation(this, stream);
    const Admission admission(insertion.admission, insertion.admission_seed);
    InsertStamped(keys, insertion.stamp, insertion.inserted,
                  insertion.admission == 1.0 ? nullptr : &admission);
    CopyOut(numbers(), keys.n, nullptr, 0, value_bytes_, out);
    TouchAndEvict(keys, true, nullptr, insertion.evicted);
  }

  void GatherColumns(const DeviceKeys& keys, const std::vector<ColumnOut>& out, bool* found,
                     DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    for (const ColumnOut& column : out) CheckColumn(column);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, found, nullptr, nullptr);
    for (const ColumnOut& column : out) {
      const RowLayout::Column& c = layout_.columns[Count(column.column)];
      const bool is_value =
          column.column == 0 ||
          layout_.slots[static_cast<size_t>(column.column) - 1].init == SlotSpec::Init::kCopyValue;
      MissingValue missing{Missing::kInitial, initial_, nullptr, 0};
      if (!is_value) missing = {Missing::kDefault, initial_, first_slots_.data() + c.offset, 1};
      GatherColumn(keys, numbers(), c.offset, c.bytes, column.data, missing, nullptr);
    }
  }

  void Pointers(const DeviceKeys& keys, void** out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    Locate(keys, nullptr, out, nullptr, nullptr, nullptr);
  }

  void PointersOrInsert(const DeviceKeys& keys, void** out, Stamp stamp, bool* inserted,
                        DeviceStream stream) override {
    const Operation operation(this, stream);
    InsertStamped(keys, stamp, inserted);
    device_.Launch(Count(keys.n), PointersBody{rows_, numbers(), Count(keys.n), out});
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void GatherPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, void* out,
                    DeviceStream stream) override {
    CheckPooled(keys, bags, missing);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    Pool(keys, bags, missing, out);
  }

  void GatherPooledOrInsert(const DeviceKeys& keys, const DeviceBags& bags, Stamp stamp, void* out,
                            DeviceStream stream) override {
    CheckPooled(keys, bags, Missing::kZeros);
    const Operation operation(this, stream);
    InsertStamped(keys, stamp, nullptr);
    Pool(keys, bags, Missing::kZeros, out);
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void MakeSplits(const int64_t* row_ids, int64_t stride, int64_t n, int64_t bags, int64_t* splits,
                  DeviceStream stream) override {
    if (stride < 1 || n < 0 || bags < 0) {
      throw Error(ErrorCode::kInvalidArgument, "Splits for table '" + options_.name + "' of " +
                                                   std::to_string(n) + " row ids, " + std::to_string(stride) +
                                                   " apart, in " + std::to_string(bags) +
                                                   " bags; expected 0 or more, 1 or more, and 0 or more.");
    }
    const Operation operation(this, stream);
    device_.Launch(Count(std::max(n, bags + 1)),
                   SplitsBody{row_ids, Count(stride), Count(n), Count(bags), splits,
                              &words_.template as<Words>()->bag_mistake});
  }

  void CheckBags(DeviceStream stream) override {
    const Operation operation(this, stream);
    uint64_t* const word = &words_.template as<Words>()->bag_mistake;
    uint64_t mistake = 0;
    device_.Copy(&mistake, word, sizeof(mistake));
    device_.WaitInside();
    if (mistake == 0) return;
    device_.Fill(word, 0, sizeof(mistake));
    const std::string at = std::to_string(BagMistake::PlaceOf(mistake));
    if (BagMistake::KindOf(mistake) == BagMistake::kSplits) {
      throw Error(ErrorCode::kInvalidArgument,
                  "A pooled lookup of table '" + options_.name +
                      "', or its gradient, got splits that do not " +
                      "rise from 0 to the number of its keys: see those of bag " + at +
                      ". What it gave means nothing.");
    }
    throw Error(ErrorCode::kInvalidArgument,
                "Splits for table '" + options_.name +
                    "' were to be made of row ids that do not rise from 0 to " +
                    "less than the number of bags: see number " + at +
                    ". Bring the indices in order (tf.sparse.reorder). What came of it means nothing.");
  }

  void SpreadGradient(const DeviceBags& bags, const void* gradient, void* out, DeviceStream stream) override {
    const Operation operation(this, stream);
    VisitValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      using Weight = const typename Element<T>::Compute;
      device_.Launch(
          Count(bags.bags * options_.dim),
          SpreadGradientBody<T>{Splits(bags, bags.ids), static_cast<Weight*>(bags.weights), bags.combiner,
                                Count(options_.dim), static_cast<const T*>(gradient), static_cast<T*>(out)});
    });
  }

  void WeightsGradient(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, const void* pooled,
                       const void* gradient, void* out, DeviceStream stream) override {
    CheckPooled(keys, bags, missing);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    VisitValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      using Compute = typename Element<T>::Compute;
      device_.Launch(Count(keys.n),
                     WeightsGradientBody<T>{Ids<T>(keys, missing), Splits(bags, keys.n),
                                            static_cast<const Compute*>(bags.weights), bags.combiner,
                                            Count(options_.dim), static_cast<const T*>(pooled),
                                            static_cast<const T*>(gradient), static_cast<Compute*>(out)});
    });
  }

  void Contains(const DeviceKeys& keys, bool* out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    Locate(keys, nullptr, nullptr, out, nullptr, nullptr);
  }

  void Positions(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    device_.Launch(Count(keys.n), PositionsBody{Batch(keys), index_, out});
  }

  void GatherStamps(const DeviceKeys& keys, uint32_t* freqs, uint32_t* versions,
                    DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    Locate(keys, nullptr, nullptr, nullptr, freqs, versions);
  }

  void Upsert(const DeviceKeys& keys, const void* values, Stamp stamp, DeviceStream stream) override {
    UpsertColumns(keys, {{0, values, options_.dim}}, stamp, stream);
  }

  void UpsertColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp,
                     DeviceStream stream) override {
    const Operation operation(this, stream);
    for (const ColumnIn& column : in) CheckColumn(column);
    WriteStamped(keys, in, stamp);
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void InsertAndEvict(const DeviceKeys& keys, const void* values, const uint64_t* scores, Stamp stamp,
                      const DeviceEvicted& evicted, DeviceStream stream) override {
    const Operation operation(this, stream);
    if (scores != nullptr) evictor_.RequireCustom();
    WriteStamped(keys, {{0, values, options_.dim}}, stamp);
    TouchAndEvict(keys, true, scores, &evicted);
  }

  void Accumulate(const DeviceKeys& keys, const void* deltas, bool from_zeros, Stamp stamp,
                  DeviceStream stream) override {
    const Operation operation(this, stream);
    Insert(keys, from_zeros ? FirstValue::kZeros : FirstValue::kInitial, nullptr);
    CopyValueToSlots(keys.n);
    VisitAnyValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      device_.Launch(Count(keys.n), AccumulateBody<T>{rows_, numbers(), Count(keys.n), options_.dim,
                                                      static_cast<const T*>(deltas)});
    });
    Unmark(keys.n, nullptr);
    StampRows(keys.n, nullptr, stamp);
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void Apply(const DeviceKeys& keys, const void* gradients, const Update& update, const SlotColumns& slots,
             Stamp stamp, DeviceStream stream) override {
    CheckBatch(keys.n);
    CheckUpdate(update);
    const OptimizerSpec& optimizer = *update.optimizer;
    if (slots.columns.size() != optimizer.slots.size()) {
      throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + optimizer.name + " keeps " +
                                                   std::to_string(optimizer.slots.size()) +
                                                   " slots; got columns for " +
                                                   std::to_string(slots.columns.size()) + ".");
    }
    const Operation operation(this, stream);
    RowsToUpdate rows;
    for (size_t s = 0; s < slots.columns.size(); ++s) {
      rows.offsets[s + 1] = layout_.At(slots.columns[s], options_.dim, slots.generation).offset;
    }
    const WorkingMemory working =
        WorkingMemoryFor<Device>(optimizer, options_.value_type, options_.dim, keys.n);
    if (keys.n == 0) return TouchAndEvict(keys, false, nullptr, nullptr);
    // All that may fail for want of memory, before anything changes.
    PrepareScratch(keys.n);
    EnsureRoom(keys);
    if (!keys.distinct) PrepareSort();
    if (Count(working.bytes) > working_.bytes()) {
      working_ = Allocate(Count(working.bytes), MemoryPlace::kDevice, "working memory");
    }
    if (optimizer.zeroes_rows) PrepareMarks();
    if (update.skip_nonfinite) EnsureRoomToFree(keys.n);

    Insert(keys, FirstValue::kInitial, flags());
    CopyValueToSlots(keys.n);
    rows.batch = SortedByRow(keys, gradients);
    rows.keys = Batch(keys);
    rows.rows = rows_;
    if (update.skip_nonfinite) {
      bool* const skipped = reinterpret_cast<bool*>(new_keys());
      VisitValueType(options_.value_type, [&](auto t) {
        device_.Launch(
            Count(keys.n) * kLanesOfRow,
            CheckGradientsBody<decltype(t)>{rows.batch, skipped, &words_.template as<Words>()->skipped});
      });
      device_.Launch(Count(keys.n),
                     EraseSkippedBody{Batch(keys), rows.batch, skipped, flags(), index_, rows_});
      Settle(0);
      rows.skipped = skipped;
    }
    rows.decay = update.hyperparameters[0] * update.hyperparameters[1];
    rows.stochastic_rounding = update.stochastic_rounding;
    rows.seed = update.seed;
    rows.zero_marks = Marks();
    rows.stamp = stamp;
    WorkingMemory given = working;
    given.memory = working_.data();
    UpdateRowsBy(GradientRuleList{}, &device_, rows, update, options_.value_type, given) ||
        UpdateRowsBy(AdamRuleList{}, &device_, rows, update, options_.value_type, given) ||
        UpdateRowsBy(GroupRuleList{}, &device_, rows, update, options_.value_type, given);
    if (!evictor_.is_bounded()) return;
    if (update.skip_nonfinite) Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);  // some have gone
    TouchAndEvict(keys, false, nullptr, nullptr);
  }

  int64_t SkippedUpdates() const override {
    const Operation operation(this, nullptr);
    uint64_t skipped = 0;
    device_.Copy(&skipped, &words_.template as<Words>()->skipped, sizeof(skipped));
    device_.WaitInside();
    return static_cast<int64_t>(skipped);
  }

  void Zeroed(const DeviceKeys& keys, bool* out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    device_.Launch(Count(keys.n), ZeroedBody{Marks(), numbers(), Count(keys.n), out});
  }

  int64_t ZeroedRows() override {
    const Operation operation(this, nullptr);
    uint32_t* const count = &words_.template as<Words>()->count;
    device_.Fill(count, 0, sizeof(uint32_t));
    device_.Launch(index_.num_buckets, CountZeroedBody{Marks(), index_, count});
    return ReadCount();
  }

  void Import(const DeviceKeys& keys, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const uint64_t* scores, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    for (const ColumnIn& column : in) CheckColumn(column);
    PrepareScratch(keys.n);
    EnsureRoom(keys);
    PrepareMarks();
    const BatchClaims claims = WriteColumns(keys, in);
    device_.Launch(Count(keys.n), AssignStampsBody{rows_, claims, numbers(), freqs, versions, Count(keys.n)});
    Unmark(keys.n, nullptr);
    for (const ColumnIn& column : in) {
      if (column.column == 0) MarkZeros(keys.n, claims, column.data);
    }
    if (!evictor_.is_bounded()) return;
    const bool by_age = options_.eviction == Eviction::kCustom && scores == nullptr;
    evictor_.Import(&device_, by_age ? Claim(keys, true) : claims, numbers(), Count(keys.n), freqs, versions,
                    scores);
    Evict(keys, true, nullptr);
  }

  int64_t EvictedCount() const override {
    const Operation operation(this, nullptr);
    uint64_t evicted = 0;
    if (evictor_.evicted() == nullptr) return 0;
    device_.Copy(&evicted, evictor_.evicted(), sizeof(evicted));
    device_.WaitInside();
    return static_cast<int64_t>(evicted);
  }

  void Scores(const DeviceKeys& keys, uint64_t* out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    if (rows_.ranks.ranks == nullptr) return device_.Fill(out, 0, Count(keys.n) * sizeof(uint64_t));
    device_.Launch(Count(keys.n), ScoresBody{Batch(keys), index_, rows_.ranks, out});
  }

  void SetScores(const DeviceKeys& keys, const uint64_t* scores, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    evictor_.RequireCustom();
    PrepareScratch(keys.n);
    PrepareClaims(keys.n);
    if (rows_.ranks.ranks == nullptr) return;  // no row was ever inserted
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    evictor_.SetScores(&device_, Claim(keys, false), numbers(), Count(keys.n), scores);
  }

  void SetEpoch(uint32_t epoch) override {
    std::lock_guard<std::mutex> hold(mutex_);
    evictor_.SetEpoch(epoch);
  }

  using DeviceTable::Remove;
  using DeviceTable::RemoveIf;

  void Remove(const DeviceKeys& keys, uint64_t* removed, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    EnsureRoomToFree(keys.n);
    device_.Launch(Count(keys.n), EraseBody{Batch(keys), index_, rows_});
    Settle(0, removed);
  }

  void RemoveIf(const RowPredicate& predicate, uint64_t* removed, DeviceStream stream) override {
    const Operation operation(this, stream);
    EnsureRoomToFree(row_capacity_);
    device_.Launch(index_.num_buckets, EraseIfBody{index_, rows_, predicate});
    Settle(0, removed);
  }

  void Shrink(int64_t rows, ShrinkOrder order, DeviceStream stream) override {
    if (rows < 0) {
      throw Error(ErrorCode::kInvalidArgument, "Table '" + options_.name + "' was to shrink to " +
                                                   std::to_string(rows) + " rows; expected 0 or more.");
    }
    const Operation operation(this, stream);
    if (RowsAtMost() <= rows) return;
    EnsureRoomToFree(row_capacity_);
    if (selection_.data() == nullptr) {
      selection_ = Allocate(sizeof(Selection), MemoryPlace::kDevice, "scratch memory");
    }
    Selection* const selection = selection_.template as<Selection>();
    device_.Launch(1, BeginSelectionBody{rows_.counters, Count(rows), selection});
    for (int digit = 0; digit < Selection::kDigits; ++digit) {
      device_.Launch(index_.num_buckets, CountDigitBody{index_, rows_, order, digit, selection});
      device_.Launch(1, PickDigitBody{digit, selection});
    }
    device_.Launch(index_.num_buckets, EraseSelectedBody{index_, rows_, order, selection});
    Settle(0);
  }

  void MoveHotRows(int64_t most, DeviceStream stream) override {
    if (most < 0) {
      throw Error(ErrorCode::kInvalidArgument, "Table '" + options_.name + "' was to move " +
                                                   std::to_string(most) + " rows; expected 0 or more.");
    }
    const Operation operation(this, stream);
    most = std::min(most, DeviceRowCount());
    if (most == 0 || !HasHostRows()) return;
    PrepareToMove(most);
    MoveHotRowsOf(0, index_.num_buckets, most);
  }

  void InDeviceMemory(const DeviceKeys& keys, bool* out, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    device_.Launch(Count(keys.n),
                   InDeviceBody{numbers(), Count(keys.n), static_cast<uint32_t>(DeviceRowCount()), out});
  }

  void Clear(DeviceStream stream) override {
    const Operation operation(this, stream);
    device_.Fill(buckets_.data(), 0, buckets_.bytes());
    device_.Fill(rows_.counters, 0, sizeof(RowCounters));
    evictor_.Clear(&device_);
    Settle(0);
    free_at_most_ = 0;
  }

  void Reserve(int64_t rows, int64_t batch, DeviceStream stream) override {
    if (rows < 0 || batch < 0) {
      throw Error(ErrorCode::kInvalidArgument, "Reserve of " + std::to_string(rows) +
                                                   " rows, for batches of " + std::to_string(batch) +
                                                   "; expected 0 or more.");
    }
    CheckBatch(batch);
    const Operation operation(this, stream);
    PrepareScratch(batch);
    PrepareClaims(batch);
    PrepareSort();
    if (evictor_.is_bounded()) rows = std::min(rows, evictor_.max_capacity());
    GrowIndex(BucketsFor(rows + batch));
    AddRows(rows + batch);
    PrepareEviction(batch);
  }

  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, DeviceStream stream) override {
    const Operation operation(this, stream);
    RowLayout to(options_.value_type, options_.dim, slots, layout_.generation + 1, &layout_);
    if (to.slots != layout_.slots) ChangeLayout(std::move(to));
    return layout_.generation;
  }

  void SetInitializer(const Initializer& initializer, DeviceStream stream) override {
    const Operation operation(this, stream);
    Block rows;  // what is queued reads the old ones, which are freed behind it
    initial_ = UploadInitialValue(initializer, &rows);
    initial_rows_ = std::move(rows);
    options_.initializer = initializer;
  }

  std::unique_ptr<DeviceExporter> Export(const RowPredicate& predicate) override {
    return std::make_unique<Exporter>(this, predicate);
  }

 private:
  using Block = DeviceBlock<Device>;

  static constexpr uint32_t kLanesOfRow = RowTile<typename Device::Lanes>::kCount;
  static constexpr double kMaxLoad = 0.8;       // 64 / 5 / 0.8 = 16 bytes of index per key
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
    uint64_t bag_mistake;
  };

  // Holds the table for one operation, and sends what it queues to a stream.
  class Operation {
   public:
    Operation(const DeviceTableImpl* table, DeviceStream stream)
        : hold_(table->mutex_), device_(&table->device_) {
      device_->Begin(stream);
    }
    ~Operation() { device_->End(); }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

   private:
    std::lock_guard<std::mutex> hold_;
    Device* device_;
  };

  // How far an export has come: all keys with lower hashes were seen.
  struct ExportProgress {
    uint64_t next_hash = 0;
    bool ended = false;
    double share = 0;  // of all hashes, looked at for the last chunk; 0: there was none
  };

  class Exporter : public DeviceExporter {
   public:
    Exporter(DeviceTableImpl* table, const RowPredicate& predicate) : table_(table), predicate_(predicate) {}

    int64_t max_rows() const override {
      std::lock_guard<std::mutex> hold(table_->mutex_);
      return progress_.ended ? 0 : table_->RowsAtMost();
    }
    int64_t Next(int64_t capacity, const Buffers& out, DeviceStream stream) override {
      return table_->ExportNext(predicate_, &progress_, capacity, out, stream);
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

  [[noreturn]] void ThrowNoMemory(size_t bytes, const char* what) const {
    throw Error(
        ErrorCode::kResourceExhausted,
        "Table '" + options_.name + "' could not get " + std::to_string(bytes) + " bytes for " + what + ": " +
            device_.MemoryLeft() +
            ". It is as it was. Give its rows less device memory (max_hbm), remove rows, or partition it.");
  }

  Block Allocate(size_t bytes, MemoryPlace place, const char* what) {
    Block block(&device_, bytes, place);
    if (block.data() == nullptr) ThrowNoMemory(bytes, what);
    return block;
  }

  // What new rows' values are; `ready` takes those that are not drawn.
  DeviceInitialValue UploadInitialValue(const Initializer& from, Block* ready) {
    const InitialValue made(from, options_.value_type, options_.dim);
    DeviceInitialValue initial;
    initial.kind = from.kind;
    initial.value_type = options_.value_type;
    initial.dim = options_.dim;
    initial.value_bytes = value_bytes_;
    initial.a = from.a;
    initial.b = from.b;
    const float a = static_cast<float>(from.a);
    initial.below32 = std::max(a, std::nextafter(static_cast<float>(from.b), a));
    initial.below64 = std::max(from.a, std::nextafter(from.b, from.a));
    initial.seed = from.seed;
    std::vector<char> rows;
    if (from.kind == Initializer::Kind::kConstant) {
      rows.resize(static_cast<size_t>(value_bytes_));
      made.Fill(0, rows.data());
    } else if (from.kind == Initializer::Kind::kRows) {
      rows = *from.rows;
      initial.num_rows = Count(from.num_rows);
    }
    if (!rows.empty()) {
      *ready = Allocate(rows.size(), MemoryPlace::kDevice, "initial values");
      device_.Copy(ready->data(), rows.data(), rows.size());
      initial.rows = ready->data();
    }
    return initial;
  }

  // A row whose slots are those of new rows, but for those that copy the value.
  Block UploadFirstSlots(const RowLayout& layout) {
    std::vector<char> row(static_cast<size_t>(layout.row_bytes));
    layout.InitializeSlots(row.data());
    Block block = Allocate(row.size(), MemoryPlace::kDevice, "initial values");
    device_.Copy(block.data(), row.data(), row.size());
    return block;
  }

  static uint64_t BucketsFor(int64_t rows) {
    return static_cast<uint64_t>(static_cast<double>(rows) / (DeviceBucket::kKeys * kMaxLoad)) + 1;
  }
  static int64_t MostKeys(uint64_t buckets) {
    return static_cast<int64_t>(static_cast<double>(buckets) * DeviceBucket::kKeys * kMaxLoad);
  }

  void GrowIndex(uint64_t buckets) {
    if (buckets <= index_.num_buckets) return;
    Block block = Allocate(buckets * sizeof(DeviceBucket), MemoryPlace::kDevice, "its index");
    device_.Fill(block.data(), 0, block.bytes());
    const DeviceIndex grown{block.template as<DeviceBucket>(), buckets};
    if (index_.num_buckets > 0) device_.Launch(index_.num_buckets, RebuildBody{index_, grown});
    buckets_ = std::move(block);
    index_ = grown;
  }

  // Makes room for this many rows in all.
  void AddRows(int64_t rows) {
    if (rows > kMaxRows) {
      throw Error(ErrorCode::kResourceExhausted, "Table '" + options_.name + "' was to hold " +
                                                     std::to_string(rows) + " rows; it can hold " +
                                                     std::to_string(kMaxRows) + ". Partition it.");
    }
    if (rows <= row_capacity_) return;
    const int64_t slab_rows = int64_t{1} << rows_.slab_bits;
    const int64_t slab_bytes = slab_rows * layout_.row_bytes;
    const int64_t added = (rows - row_capacity_ + slab_rows - 1) / slab_rows;
    // The first slabs are in device memory, the others are not.
    const int64_t in_device = HasHostRows() ? 0 : std::min(added, DeviceSlabsFor(slab_bytes) - device_slabs_);
    const int64_t host_slabs = static_cast<int64_t>(slabs_.size()) - device_slabs_;
    RowRoom room = MakeRowRoom(device_slabs_ + in_device, host_slabs + added - in_device, slab_bytes);
    Block stamps =
        Allocate(Count(added * slab_rows) * sizeof(DeviceStamp), MemoryPlace::kDevice, "its stamps");
    const size_t slabs = slabs_.size() + Count(added);
    Block table;
    const bool moves = slabs * sizeof(DeviceSlab) > slab_table_.bytes();
    if (moves) table = Allocate(2 * slabs * sizeof(DeviceSlab), MemoryPlace::kDevice, "its slabs");

    if (host_slabs + added > in_device) PrepareTurns(device_slabs_ + in_device);
    TakeRowRoom(std::move(room));
    device_slabs_ += in_device;
    for (int64_t s = 0; s < added; ++s) {
      slabs_.push_back({nullptr, stamps.template as<DeviceStamp>() + s * slab_rows});
    }
    PlaceSlabs(slab_bytes);
    if (moves) slab_table_ = std::move(table);
    device_.Copy(slab_table_.data(), slabs_.data(), slabs * sizeof(DeviceSlab));
    rows_.slabs = slab_table_.template as<DeviceSlab>();
    stamp_blocks_.push_back(std::move(stamps));
    row_capacity_ += added * slab_rows;
  }

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

  RowRoom MakeRowRoom(int64_t device_slabs, int64_t host_slabs, int64_t slab_bytes) {
    RowRoom room;
    room.in_device =
        AllocateSlabs(device_slabs - PlacesIn(device_rows_, slab_bytes), slab_bytes, MemoryPlace::kDevice);
    room.on_host =
        AllocateSlabs(host_slabs - PlacesIn(host_rows_, slab_bytes), slab_bytes, MemoryPlace::kPinnedHost);
    return room;
  }
  void TakeRowRoom(RowRoom room) {
    device_rows_.Add(std::move(room.in_device));
    host_rows_.Add(std::move(room.on_host));
  }

  // In blocks that are small beside a large table, so that one can go when the rows become narrower.
  std::vector<Block> AllocateSlabs(int64_t slabs, int64_t slab_bytes, MemoryPlace place) {
    const char* const what = place == MemoryPlace::kDevice ? "its rows" : "its rows, in pinned host memory";
    const int64_t of_block = std::max(int64_t{1}, kMostBlockBytes / slab_bytes);
    std::vector<Block> blocks;
    for (; slabs > 0; slabs -= of_block) {
      blocks.push_back(Allocate(Padded(std::min(slabs, of_block) * slab_bytes), place, what));
    }
    return blocks;
  }

  // Gives the slabs their places.
  void PlaceSlabs(int64_t slab_bytes) {
    const std::vector<char*> in_device = device_rows_.Places(slab_bytes);
    const std::vector<char*> on_host = host_rows_.Places(slab_bytes);
    const size_t device_slabs = Count(device_slabs_);
    for (size_t s = 0; s < slabs_.size(); ++s) {
      slabs_[s].rows = s < device_slabs ? in_device[s] : on_host[s - device_slabs];
    }
  }

  // Gives all rows another layout. All memory it takes, it takes first: what wider rows need beside the
  // memory there is, and some to stage rows in (relayout_kernels.h).
  void ChangeLayout(RowLayout to) {
    const int64_t slab_bytes = to.row_bytes << rows_.slab_bits;
    const bool widens = to.row_bytes > layout_.row_bytes;
    const int64_t slabs = static_cast<int64_t>(slabs_.size());
    // Wider rows may have to leave device memory; others go where there is room.
    const int64_t in_device = widens ? std::min(device_slabs_, DeviceSlabsFor(slab_bytes))
                                     : std::min(slabs, PlacesIn(device_rows_, slab_bytes));
    RowCounters counters;
    device_.Copy(&counters, rows_.counters, sizeof(counters));
    device_.WaitInside();
    const int64_t rows = counters.high_water;
    const int64_t group = std::min(rows, std::max(int64_t{64}, kStageBytes / layout_.row_bytes));

    Block first_slots = UploadFirstSlots(to);
    RowRoom room = MakeRowRoom(in_device, slabs - in_device, slab_bytes);
    Block table;
    if (slabs > 0) table = Allocate(slab_table_.bytes(), MemoryPlace::kDevice, "its slabs");
    Block stage;
    if (rows > 0) {
      stage =
          Allocate(Count(group * layout_.row_bytes), MemoryPlace::kDevice, "rows that change their slots");
    }

    if (slabs > in_device) PrepareTurns(in_device);

    const DeviceRows before = rows_;
    const RowLayout from = std::exchange(layout_, std::move(to));
    first_slots_ = std::move(first_slots);
    TakeRowRoom(std::move(room));
    device_slabs_ = in_device;
    PlaceSlabs(slab_bytes);
    rows_.row_bytes = layout_.row_bytes;
    options_.slots = layout_.slots;
    if (slabs > 0) {
      device_.Copy(table.data(), slabs_.data(), slabs_.size() * sizeof(DeviceSlab));
      rows_.slabs = table.template as<DeviceSlab>();
    }
    const int64_t groups = rows == 0 ? 0 : (rows + group - 1) / group;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = (widens ? groups - 1 - g : g) * group;
      const uint64_t n = Count(std::min(group, rows - first));
      device_.Launch(
          n, StageRowsBody{before, Count(first), n, AlignmentOf(Count(from.row_bytes)), stage.data()});
      MoveColumns(from, Count(first), n, stage.data());
    }
    device_.WaitInside();  // pinned memory is freed at once
    device_rows_.KeepFirst(device_slabs_, slab_bytes);
    host_rows_.KeepFirst(slabs - device_slabs_, slab_bytes);
    if (slabs > 0) slab_table_ = std::move(table);
  }

  // Writes the columns of rows that lie in `stage` as they were.
  void MoveColumns(const RowLayout& from, uint64_t first, uint64_t n, const char* stage) {
    for (size_t c = 0; c < layout_.columns.size(); ++c) {
      const RowLayout::Column& column = layout_.columns[c];
      const char* source = stage;  // the value
      int64_t stride = from.row_bytes;
      if (c > 0) {
        const SlotSpec& slot = layout_.slots[c - 1];
        const auto same = std::find_if(from.slots.begin(), from.slots.end(), [&](const SlotSpec& s) {
          return s.name == slot.name && s.width == slot.width;
        });
        if (same != from.slots.end()) {
          source += from.columns[static_cast<size_t>(same - from.slots.begin()) + 1].offset;
        } else if (slot.init != SlotSpec::Init::kCopyValue) {
          source = first_slots_.data() + column.offset;
          stride = 0;
        }
      }
      device_.Launch(
          n, MoveColumnBody{rows_, first, n, column.offset, column.bytes,
                            Alignment(Count(column.offset | column.bytes | stride), source), source, stride});
    }
  }

  // To whole words, for ChangeElement.
  static size_t Padded(int64_t bytes) { return (Count(bytes) + 3) / 4 * 4; }

  // Rows there can be, by what is known without waiting; exact after Wait.
  int64_t RowsAtMost() const {
    const uint64_t report = LoadAcquire(report_.template as<uint64_t>());
    const uint32_t sequence = static_cast<uint32_t>(report >> 32);
    while (!queued_.empty() && static_cast<int32_t>(queued_.front().sequence - sequence) <= 0) {
      queued_keys_ -= queued_.front().keys;
      queued_.pop_front();
    }
    const int64_t rows = static_cast<int64_t>(static_cast<uint32_t>(report)) + queued_keys_;
    // This is asked between batches, each of which has evicted.
    return evictor_.is_bounded() ? std::min(rows, evictor_.max_capacity()) : rows;
  }

  bool HasRoomFor(int64_t rows) const {
    return rows <= row_capacity_ && rows <= MostKeys(index_.num_buckets);
  }

  void EnsureRoom(const DeviceKeys& keys) {
    if (HasRoomFor(RowsAtMost() + keys.n)) return;
    device_.WaitInside();
    const int64_t rows = RowsAtMost();
    const int64_t needed = rows + keys.n;
    if (HasRoomFor(needed)) return;
    // By more than is needed, if there is memory; by what is needed; or not at all, if the keys are there
    // already.
    try {
      GrowTo(needed, true);
      return;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted) throw;
    }
    try {
      GrowTo(needed, false);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted) throw;
      const int64_t least = rows + CountMissing(keys);
      if (!HasRoomFor(least)) GrowTo(least, false);
    }
  }

  void GrowTo(int64_t rows, bool generously) {
    if (rows > row_capacity_) {
      int64_t generous = std::min(kMaxRows, row_capacity_ + row_capacity_ / kRowGrowth);
      if (evictor_.is_bounded()) generous = std::min(generous, evictor_.max_capacity() + scratch_keys_);
      AddRows(generously ? std::max(rows, generous) : rows);
    }
    if (rows > MostKeys(index_.num_buckets)) {
      const uint64_t grown =
          static_cast<uint64_t>(static_cast<double>(index_.num_buckets) * kIndexGrowth) + 1;
      GrowIndex(generously ? std::max(BucketsFor(rows), grown) : BucketsFor(rows));
    }
  }

  int64_t CountMissing(const DeviceKeys& keys) {
    uint32_t* const count = &words_.template as<Words>()->count;
    device_.Fill(count, 0, sizeof(uint32_t));
    device_.Launch(Count(keys.n), CountMissingBody{Batch(keys), index_, count});
    return ReadCount();
  }

  int64_t ReadCount() {
    uint32_t count = 0;
    device_.Copy(&count, &words_.template as<Words>()->count, sizeof(count));
    device_.WaitInside();
    return count;
  }

  void EnsureRoomToFree(int64_t rows) {
    free_at_most_ = std::min(free_at_most_ + rows, row_capacity_);
    const size_t bytes = Count(free_at_most_) * sizeof(uint32_t);
    if (bytes <= free_rows_.bytes()) return;
    Block block = Allocate(bytes + bytes / 4, MemoryPlace::kDevice, "its list of free rows");
    if (free_rows_.data() != nullptr) device_.Copy(block.data(), free_rows_.data(), free_rows_.bytes());
    free_rows_ = std::move(block);
    rows_.free_rows = free_rows_.template as<uint32_t>();
  }

  // ---- Scratch memory: arrays of a batch's length, until the next operation

  void PrepareScratch(int64_t n) {
    if (n <= scratch_keys_) return;
    const size_t keys = (Count(n) + Count(n) / 4 + 63) / 64 * 64;
    scratch_ = Allocate(keys * (sizeof(Slot) + 2 * sizeof(uint32_t) + sizeof(bool)), MemoryPlace::kDevice,
                        "scratch memory");
    scratch_keys_ = static_cast<int64_t>(keys);
  }
  Slot* new_slots() const { return scratch_.template as<Slot>(); }
  uint32_t* numbers() const { return reinterpret_cast<uint32_t*>(new_slots() + scratch_keys_); }
  uint32_t* new_keys() const { return numbers() + scratch_keys_; }
  bool* flags() const { return reinterpret_cast<bool*>(new_keys() + scratch_keys_); }

  static uint64_t ClaimsFor(int64_t n) { return std::min(2 * Count(n), uint64_t{UINT32_MAX}) + 1; }
  void PrepareClaims(int64_t n) {
    const size_t bytes = ClaimsFor(n) * sizeof(uint64_t);
    if (bytes > claims_.bytes()) {
      claims_ = Allocate(bytes + bytes / 4 / 8 * 8, MemoryPlace::kDevice, "scratch memory");
    }
  }

  // Scratch for sorting as large a batch as there is scratch memory for.
  void PrepareSort() {
    if (scratch_keys_ <= sortable_keys_) return;
    sort_scratch_ =
        Allocate(device_.SortScratchBytes(Count(scratch_keys_)), MemoryPlace::kDevice, "scratch memory");
    sortable_keys_ = scratch_keys_;
  }

  // Makes room for the marks of all rows.
  void PrepareMarks() {
    const size_t bytes = (Count(row_capacity_) + 31) / 32 * sizeof(uint32_t);
    if (bytes <= marks_.bytes()) return;
    Block block = Allocate((bytes + bytes / 4 + 3) / 4 * 4, MemoryPlace::kDevice, "its marks of zero rows");
    device_.Fill(block.data(), 0, block.bytes());
    if (marks_.data() != nullptr) device_.Copy(block.data(), marks_.data(), marks_.bytes());
    marks_ = std::move(block);
  }
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
              uint32_t* versions) {
    device_.Launch(Count(keys.n),
                   LocateBody{Batch(keys), index_, rows_, out, pointers, found, freqs, versions});
  }

  void GatherColumn(const DeviceKeys& keys, const uint32_t* located, int64_t offset, int64_t bytes, void* out,
                    const MissingValue& missing, bool* found) {
    const int alignment = Alignment(Count(offset | bytes), out, missing.defaults);
    device_.Launch(Count(keys.n), GatherBody{Batch(keys), index_, rows_, located, missing, offset, bytes,
                                             alignment, static_cast<char*>(out), found});
  }

  void CopyOut(const uint32_t* rows, int64_t n, const uint32_t* limit, int64_t offset, int64_t bytes,
               void* out) {
    device_.Launch(Count(n), GatherRowsBody{rows_, rows, Count(n), limit, offset, bytes,
                                            Alignment(Count(offset | bytes), out), static_cast<char*>(out)});
  }

  BagSplits Splits(const DeviceBags& bags, int64_t ids) const {
    return {bags.splits, Count(bags.bags), ids, &words_.template as<Words>()->bag_mistake};
  }

  void CheckPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing) const {
    CheckBatch(keys.n);
    RequireFloating();
    if (bags.bags < 0 || (bags.bags == 0 && keys.n > 0)) {
      throw Error(ErrorCode::kInvalidArgument, "A pooled lookup of table '" + options_.name + "' has " +
                                                   std::to_string(keys.n) + " keys in " +
                                                   std::to_string(bags.bags) + " bags.");
    }
    if (missing != Missing::kDefault) return;
    throw Error(ErrorCode::kInvalidArgument,
                "A pooled lookup of table '" + options_.name +
                    "' takes zeros or initial values for missing keys; got default rows.");
  }

  // Throws on tables of integers before anything is done.
  void RequireFloating() const {
    VisitValueType(options_.value_type, [](auto) {});
  }

  // The rows of keys that have been located.
  template <class T>
  IdRows<T> Ids(const DeviceKeys& keys, Missing missing) const {
    return {Batch(keys), rows_, numbers(), {missing, initial_, nullptr, 0}};
  }

  void Pool(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, void* out) {
    VisitValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      using Weight = const typename Element<T>::Compute;
      device_.Launch(
          Count(bags.bags * options_.dim),
          PoolBody<T>{Ids<T>(keys, missing), Splits(bags, keys.n), static_cast<Weight*>(bags.weights),
                      bags.combiner, Count(options_.dim), static_cast<T*>(out)});
    });
  }

  // Finds or makes the row of each key; numbers() are their rows then. A new row's slots that copy the value
  // are the caller's to see to.
  void Insert(const DeviceKeys& keys, FirstValue first_value, bool* inserted,
              const Admission* admission = nullptr) {
    CheckBatch(keys.n);
    const uint64_t n = Count(keys.n);
    PrepareScratch(keys.n);
    EnsureRoom(keys);
    PrepareEviction(keys.n);
    TakeATurn();  // before any row is found
    if (admission != nullptr) device_.Launch(n, AdmitBody{Batch(keys), index_, *admission, numbers()});
    device_.Launch(n, InsertBody{Batch(keys), index_, rows_, numbers(), new_keys(), new_slots(), inserted,
                                 admission != nullptr});
    device_.Launch(n, PlaceNewBody{Batch(keys), index_, rows_, new_keys(), new_slots(), initial_, first_value,
                                   first_slots_.data() + value_bytes_, Alignment(Count(value_bytes_)),
                                   Alignment(Count(value_bytes_))});
    Settle(keys.n);
    if (!keys.distinct) device_.Launch(n, ResolveBody{Batch(keys), index_, numbers()});
  }

  // ---- Hot rows

  int64_t DeviceRowCount() const { return device_slabs_ << rows_.slab_bits; }

  void PrepareToMove(int64_t most) {
    if (most <= most_moving_) return;
    moving_ =
        Allocate(sizeof(HotRows) + 2 * Count(most) * sizeof(Slot), MemoryPlace::kDevice, "scratch memory");
    most_moving_ = most;
  }

  // Where so many slabs are to be in device memory.
  void PrepareTurns(int64_t device_slabs) {
    PrepareToMove(std::min(options_.move_hot_rows, device_slabs << rows_.slab_bits));
  }

  void TakeATurn() {
    if (options_.move_hot_rows <= 0 || !HasHostRows() || ++batches_ % kBatchesPerTurn != 0) return;
    const int64_t most = std::min(options_.move_hot_rows, DeviceRowCount());
    if (most == 0) return;
    const uint64_t buckets =
        std::min(index_.num_buckets, Count(most) * kLooksPerMove / DeviceBucket::kKeys + 1);
    if (hand_ >= index_.num_buckets) hand_ = 0;
    MoveHotRowsOf(hand_, buckets, most);
    hand_ += buckets;
  }

  void MoveHotRowsOf(uint64_t begin, uint64_t buckets, int64_t most_rows) {
    HotRows* const state = moving_.template as<HotRows>();
    Slot* const hot = reinterpret_cast<Slot*>(state + 1);
    Slot* const cold = hot + most_rows;
    const IndexWindow window{index_, begin, buckets};
    const uint32_t most = static_cast<uint32_t>(most_rows);
    const uint32_t device_rows = static_cast<uint32_t>(DeviceRowCount());
    device_.Fill(state, 0, sizeof(HotRows));
    device_.Launch(buckets, CountPlacesBody{window, rows_, device_rows, state});
    device_.Launch(1, BeginRanksBody{most, state});
    for (int digit = 0; digit < StampRank::kDigits; ++digit) {
      device_.Launch(buckets, CountStampDigitBody{window, rows_, device_rows, digit, state});
      device_.Launch(1, PickStampDigitBody{digit, state});
    }
    for (const bool on_bounds : {false, true}) {
      device_.Launch(buckets, ListMovingBody{window, rows_, device_rows, on_bounds, most, state, hot, cold});
    }
    device_.Launch(Count(most_rows), SwapRowsBody{index_, rows_, Marks(), evictor_.ranked(), most, state, hot,
                                                  cold, AlignmentOf(Count(layout_.row_bytes))});
  }

  void Settle(int64_t keys, uint64_t* removed = nullptr) {
    ++sequence_;
    if (keys > 0) queued_.push_back({sequence_, keys});
    queued_keys_ += keys;
    device_.Launch(1, SettleBody{rows_.counters, &words_.template as<Words>()->num_new,
                                 report_.template as<uint64_t>(), sequence_, removed});
  }

  void CopyValueToSlots(int64_t n) {
    for (size_t s = 0; s < layout_.slots.size(); ++s) {
      if (layout_.slots[s].init != SlotSpec::Init::kCopyValue) continue;
      const int64_t offset = layout_.columns[s + 1].offset;
      device_.Launch(
          Count(n), CopyValueBody{rows_, numbers(), new_keys(), &words_.template as<Words>()->num_new, offset,
                                  value_bytes_, Alignment(Count(offset | value_bytes_))});
    }
  }

  void InsertStamped(const DeviceKeys& keys, Stamp stamp, bool* inserted,
                     const Admission* admission = nullptr) {
    PrepareScratch(keys.n);
    bool* const is_new = inserted == nullptr ? flags() : inserted;
    Insert(keys, FirstValue::kInitial, is_new, admission);
    CopyValueToSlots(keys.n);
    Unmark(keys.n, is_new);
    StampRows(keys.n, is_new, stamp);
  }

  void WriteStamped(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp) {
    WriteColumns(keys, in);
    Unmark(keys.n, nullptr);
    StampRows(keys.n, nullptr, stamp);
  }

  // ---- Bounded tables (evictor.h)

  // All that the end of a batch needs, before it begins.
  void PrepareEviction(int64_t n) {
    if (!evictor_.is_bounded()) return;
    PrepareClaims(n);
    PrepareSort();
    EnsureRoomToFree(row_capacity_);
    evictor_.Prepare(&device_, row_capacity_, n,
                     [this](size_t bytes) { return Allocate(bytes, MemoryPlace::kDevice, "its scores"); });
    rows_.ranks = evictor_.ranks();
    may_exceed_ = RowsAtMost() + n > evictor_.max_capacity();
  }

  // The end of a batch whose rows are in numbers().
  void TouchAndEvict(const DeviceKeys& keys, bool counted, const uint64_t* scores,
                     const DeviceEvicted* evicted) {
    if (evictor_.is_bounded()) {
      if (keys.n == 0) PrepareEviction(0);
      evictor_.Tick(&device_);
      evictor_.Touch(&device_, Claim(keys, options_.eviction == Eviction::kCustom), numbers(), Count(keys.n),
                     counted, may_exceed_);
      if (scores != nullptr) {
        evictor_.SetScores(&device_, Claim(keys, false), numbers(), Count(keys.n), scores);
      }
    }
    Evict(keys, false, evicted);
  }

  // What a batch evicts. `imported`: its rows stand by their scores.
  void Evict(const DeviceKeys& keys, bool imported, const DeviceEvicted* evicted) {
    uint64_t* const count = evicted == nullptr ? nullptr : evicted->count;
    if (!evictor_.is_bounded() || !may_exceed_) {
      if (count != nullptr) device_.Fill(count, 0, sizeof(uint64_t));
      return;
    }
    const uint64_t n = Count(keys.n);
    const auto sort = [this](auto... arguments) {
      device_.SortPairs(sort_scratch_.data(), sort_scratch_.bytes(), arguments...);
    };
    evictor_.FindVictims(&device_, rows_.counters, n, imported, count);
    if (!imported && keys.n > evictor_.max_capacity()) {
      evictor_.FindEarliest(&device_, Claim(keys, false), numbers(), n, sort);
    }
    if (evicted != nullptr && evicted->WantsRows()) {
      const uint32_t* limit = nullptr;
      const uint32_t* const victims = evictor_.OrderVictims(&device_, rows_.counters, n, sort, &limit);
      const int64_t most = std::min(keys.n, evicted->capacity);
      evictor_.CopyVictims(&device_, victims, Count(most), narrow_, *evicted);
      if (evicted->values != nullptr) CopyOut(victims, most, limit, 0, value_bytes_, evicted->values);
    }
    evictor_.EraseVictims(&device_, index_, rows_, n);
    if (!imported) evictor_.UnmarkOwn(&device_, numbers(), n);
    Settle(0);
  }

  void Unmark(int64_t n, const bool* only) {
    if (marks_.data() == nullptr) return;
    device_.Launch(Count(n), UnmarkBody{Marks(), numbers(), only, Count(n)});
  }

  void MarkZeros(int64_t n, const BatchClaims& claims, const void* values) {
    MarkZerosBody body{Marks(),
                       claims,
                       numbers(),
                       Count(n),
                       static_cast<const uint8_t*>(values),
                       Count(value_bytes_),
                       Count(SizeOf(options_.value_type))};
    if (!IsFloating(options_.value_type)) body.highest = 0xff;
    device_.Launch(Count(n), body);
  }

  // The batch whose rows are in numbers(), equal rows side by side. In memory that new keys no longer need.
  BatchGradients SortedByRow(const DeviceKeys& keys, const void* gradients) {
    BatchGradients batch;
    batch.row_of = numbers();
    batch.n = Count(keys.n);
    batch.gradients = gradients;
    batch.dim = options_.dim;
    if (keys.distinct) return batch;
    uint32_t* const rows = reinterpret_cast<uint32_t*>(new_slots());
    uint32_t* const places = rows + scratch_keys_;
    int bits = 1;
    while (bits < 32 && row_capacity_ >> bits != 0) ++bits;
    device_.Launch(batch.n, PlacesBody{new_keys(), batch.n});
    device_.SortPairs(sort_scratch_.data(), sort_scratch_.bytes(), numbers(), rows, new_keys(), places,
                      batch.n, bits);
    batch.row_of = rows;
    batch.place_of = places;
    return batch;
  }

  void StampRows(int64_t n, const bool* only, Stamp stamp) {
    device_.Launch(Count(n), StampBody{rows_, numbers(), only, Count(n), stamp});
  }

  // Claims for a batch whose rows are in numbers().
  BatchClaims Claim(const DeviceKeys& keys, bool first) {
    BatchClaims claims;
    if (keys.distinct) return claims;
    claims = {claims_.template as<uint64_t>(), ClaimsFor(keys.n), first};
    device_.Fill(claims.claims, 0xff, claims.count * sizeof(uint64_t));
    device_.Launch(Count(keys.n), ClaimBody{claims, numbers(), Count(keys.n)});
    return claims;
  }

  // Returns the claims of the last occurrences.
  BatchClaims WriteColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in) {
    const void* value = nullptr;
    for (const ColumnIn& column : in) {
      if (column.column == 0) value = column.data;
    }
    CheckBatch(keys.n);
    PrepareScratch(keys.n);
    if (!keys.distinct) PrepareClaims(keys.n);
    Insert(keys, value != nullptr ? FirstValue::kNothing : FirstValue::kInitial, flags());
    if (value == nullptr) {
      CopyValueToSlots(keys.n);
    } else if (CopiesValue()) {
      // A row comes to be with the value of its key's first occurrence, so that is what slots copy.
      const BatchClaims firsts = Claim(keys, true);
      for (size_t s = 0; s < layout_.slots.size(); ++s) {
        if (layout_.slots[s].init != SlotSpec::Init::kCopyValue) continue;
        Assign(keys.n, firsts, flags(), layout_.columns[s + 1], value);
      }
    }
    const BatchClaims lasts = Claim(keys, false);
    for (const ColumnIn& column : in) {
      Assign(keys.n, lasts, nullptr, layout_.columns[static_cast<size_t>(column.column)], column.data);
    }
    return lasts;
  }

  bool CopiesValue() const {
    return std::any_of(layout_.slots.begin(), layout_.slots.end(),
                       [](const SlotSpec& slot) { return slot.init == SlotSpec::Init::kCopyValue; });
  }

  void Assign(int64_t n, const BatchClaims& claims, const bool* only, const RowLayout::Column& to,
              const void* in) {
    device_.Launch(Count(n),
                   AssignBody{rows_, claims, numbers(), only, Count(n), to.offset, to.bytes,
                              Alignment(Count(to.offset | to.bytes), in), static_cast<const char*>(in)});
  }

  int64_t ExportNext(const RowPredicate& predicate, ExportProgress* progress, int64_t capacity,
                     const DeviceExporter::Buffers& out, DeviceStream stream) {
    if (capacity < 1) {
      throw Error(ErrorCode::kInvalidArgument, "An export of table '" + options_.name + "' in chunks of " +
                                                   std::to_string(capacity) + " rows; expected at least 1.");
    }
    const Operation operation(this, stream);
    for (const ColumnOut& column : out.columns) CheckColumn(column);
    if (progress->ended) return -1;
    const int64_t rows = std::max(int64_t{1}, RowsAtMost());
    const int64_t room = std::min(capacity, rows);
    PrepareScratch(room);
    // As many hashes as very likely have room for their keys; where few rows are meant, ever more of them.
    const double few = 4 * std::sqrt(static_cast<double>(room));
    const double expected = room == rows
                                ? static_cast<double>(rows)
                                : std::max(static_cast<double>(room) / 2, static_cast<double>(room) - few);
    double share = std::max(progress->share, expected / static_cast<double>(rows));
    for (;; share /= 2) {
      constexpr double kHashes = 18446744073709551616.0;  // 2^64
      const uint64_t left = UINT64_MAX - progress->next_hash;
      const bool is_last = share * kHashes >= static_cast<double>(left);
      const uint64_t last_hash =
          is_last ? UINT64_MAX : progress->next_hash + static_cast<uint64_t>(share * kHashes);
      const int64_t n = ListRows(predicate, progress->next_hash, last_hash, room, out);
      if (n > room) continue;  // look at fewer
      for (const ColumnOut& column : out.columns) {
        const RowLayout::Column& c = layout_.columns[static_cast<size_t>(column.column)];
        CopyOut(numbers(), n, nullptr, c.offset, c.bytes, column.data);
      }
      device_.WaitInside();
      progress->ended = is_last;
      progress->next_hash = last_hash + 1;
      progress->share = n < room / 4 ? 2 * share : share;
      return n;
    }
  }

  // Lists the rows that are meant and whose keys have these hashes, in numbers(), if they are no more than
  // `room`; and returns how many they are.
  int64_t ListRows(const RowPredicate& predicate, uint64_t first_hash, uint64_t last_hash, int64_t room,
                   const DeviceExporter::Buffers& out) {
    uint32_t* const count = &words_.template as<Words>()->count;
    device_.Fill(count, 0, sizeof(uint32_t));
    const uint64_t first_home = index_.HomeOfHash(first_hash);
    const uint64_t last_home = index_.HomeOfHash(last_hash);
    device_.Launch(last_home - first_home + 1,
                   ListBody{index_, rows_, predicate, first_hash, last_hash, first_home, last_home,
                            static_cast<uint32_t>(room), count, numbers(), out.keys, narrow_, out.freqs,
                            out.versions, out.scores});
    return ReadCount();
  }

  // Declared first, so that it outlives the memory.
  mutable Device device_;
  DeviceTableOptions options_;  // slots and initializer as they are now, which mutex_ guards
  const bool narrow_;
  const int64_t value_bytes_;

  Evictor<Device> evictor_;  // guarded by mutex_, its policy aside
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
  Block report_;  // uint64_t in host memory; see SettleBody
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
