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
#include "initial_value.h"
#include "insert_kernels.h"
#include "kvtable/device_table.h"
#include "pool_kernels.h"
#include "row_layout.h"
#include "shrink_kernels.h"
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
        layout_(CheckedLayout(options)),
        evictor_(options.name, options.max_capacity, options.eviction, options.clock, eviction_tuning) {
    rows_.row_bytes = layout_.row_bytes;
    rows_.slab_bits = kMinSlabBits;
    while (rows_.slab_bits < kMaxSlabBits && layout_.row_bytes << (rows_.slab_bits + 1) <= kSlabBytes) {
      ++rows_.slab_bits;
    }
    device_.Begin(nullptr);
    words_ = Allocate(sizeof(Words), MemoryPlace::kDevice, "counters");
    device_.Fill(words_.data(), 0, sizeof(Words));
    report_ = Allocate(sizeof(uint64_t), MemoryPlace::kPinnedHost, "a counter");
    *report_.template as<uint64_t>() = 0;
    rows_.counters = &words_.template as<Words>()->counters;
    UploadFirstContents();
    GrowIndex(kMinBuckets);
    device_.End();
    if (options.capacity_hint > 0) Reserve(options.capacity_hint, 0, nullptr);
  }

  // Frees nothing that the device still uses.
  ~DeviceTableImpl() override { device_.Wait(); }

  const DeviceTableOptions& options() const override { return options_; }

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
    use.slack_bytes = row_capacity_ * layout_.row_bytes - use.row_bytes;
    use.scratch_bytes =
        static_cast<int64_t>(scratch_.bytes() + claims_.bytes() + sort_scratch_.bytes() + working_.bytes()) +
        evictor_.scratch_bytes();
    use.host_bytes = host_row_bytes_;
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
    for (const ColumnOut& column : out) layout_.At(column.column, column.width);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, found, nullptr, nullptr);
    for (const ColumnOut& column : out) {
      const RowLayout::Column& c = layout_.At(column.column, column.width);
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
    CheckPooled(keys, missing);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    Pool(keys, bags, missing, out);
  }

  void GatherPooledOrInsert(const DeviceKeys& keys, const DeviceBags& bags, Stamp stamp, void* out,
                            DeviceStream stream) override {
    RequireFloating();
    const Operation operation(this, stream);
    InsertStamped(keys, stamp, nullptr);
    Pool(keys, bags, Missing::kZeros, out);
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void SpreadGradient(const DeviceBags& bags, const void* gradient, void* out, DeviceStream stream) override {
    const Operation operation(this, stream);
    VisitValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      using Weight = const typename Element<T>::Compute;
      device_.Launch(Count(bags.bags * options_.dim),
                     SpreadGradientBody<T>{bags.splits, Count(bags.bags), static_cast<Weight*>(bags.weights),
                                           bags.combiner, Count(options_.dim),
                                           static_cast<const T*>(gradient), static_cast<T*>(out)});
    });
  }

  void WeightsGradient(const DeviceKeys& keys, const DeviceBags& bags, Missing missing, const void* pooled,
                       const void* gradient, void* out, DeviceStream stream) override {
    CheckPooled(keys, missing);
    const Operation operation(this, stream);
    PrepareScratch(keys.n);
    Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
    VisitValueType(options_.value_type, [&](auto t) {
      using T = decltype(t);
      using Compute = typename Element<T>::Compute;
      device_.Launch(Count(keys.n),
                     WeightsGradientBody<T>{Ids<T>(keys, missing), bags.splits, Count(bags.bags),
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

  void GatherStamps(const DeviceKeys& keys, uint32_t* freqs, uint32_t* versions,
                    DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    Locate(keys, nullptr, nullptr, nullptr, freqs, versions);
  }

  void Upsert(const DeviceKeys& keys, const void* values, Stamp stamp, DeviceStream stream) override {
    UpsertColumns(keys, {{0, values}}, stamp, stream);
  }

  void UpsertColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp,
                     DeviceStream stream) override {
    for (const ColumnIn& column : in) layout_.At(column.column, column.width);
    const Operation operation(this, stream);
    WriteStamped(keys, in, stamp);
    TouchAndEvict(keys, true, nullptr, nullptr);
  }

  void InsertAndEvict(const DeviceKeys& keys, const void* values, const uint64_t* scores, Stamp stamp,
                      const DeviceEvicted& evicted, DeviceStream stream) override {
    const Operation operation(this, stream);
    if (scores != nullptr) evictor_.RequireCustom();
    WriteStamped(keys, {{0, values}}, stamp);
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

  void Apply(const DeviceKeys& keys, const void* gradients, const Update& update,
             const std::vector<int>& slots, Stamp stamp, DeviceStream stream) override {
    CheckBatch(keys.n);
    CheckUpdate(update);
    const OptimizerSpec& optimizer = *update.optimizer;
    if (slots.size() != optimizer.slots.size()) {
      throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + optimizer.name + " keeps " +
                                                   std::to_string(optimizer.slots.size()) +
                                                   " slots; got columns for " + std::to_string(slots.size()) +
                                                   ".");
    }
    RowsToUpdate rows;
    for (size_t s = 0; s < slots.size(); ++s) {
      rows.offsets[s + 1] = layout_.At(slots[s], options_.dim).offset;
    }
    const WorkingMemory working =
        WorkingMemoryFor<Device>(optimizer, options_.value_type, options_.dim, keys.n);
    const Operation operation(this, stream);
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
    for (const ColumnIn& column : in) layout_.At(column.column, column.width);
    const Operation operation(this, stream);
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

  void Remove(const DeviceKeys& keys, DeviceStream stream) override {
    CheckBatch(keys.n);
    const Operation operation(this, stream);
    EnsureRoomToFree(keys.n);
    device_.Launch(Count(keys.n), EraseBody{Batch(keys), index_, rows_});
    Settle(0);
  }

  void RemoveIf(const RowPredicate& predicate, DeviceStream stream) override {
    const Operation operation(this, stream);
    EnsureRoomToFree(row_capacity_);
    device_.Launch(index_.num_buckets, EraseIfBody{index_, rows_, predicate});
    Settle(0);
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

  std::unique_ptr<DeviceExporter> Export(const RowPredicate& predicate) override {
    std::lock_guard<std::mutex> hold(mutex_);
    return std::make_unique<Exporter>(this, predicate, index_generation_);
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
  static constexpr int kMinSlabBits = 6;
  static constexpr int kMaxSlabBits = 20;
  static constexpr int64_t kMaxRows = int64_t{kPending} - (int64_t{1} << kMaxSlabBits);

  // In device memory.
  struct Words {
    RowCounters counters;
    uint32_t num_new;  // rows that the last inserting launch made
    uint32_t count;    // of whatever is counted
    uint64_t skipped;  // row updates left out
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

  class Exporter : public DeviceExporter {
   public:
    Exporter(DeviceTableImpl* table, const RowPredicate& predicate, uint64_t generation)
        : table_(table), predicate_(predicate), generation_(generation) {}

    int64_t Next(int64_t capacity, const Buffers& out, DeviceStream stream) override {
      return table_->ExportNext(predicate_, generation_, &next_bucket_, capacity, out, stream);
    }

   private:
    DeviceTableImpl* table_;
    RowPredicate predicate_;
    uint64_t generation_;
    uint64_t next_bucket_ = 0;
  };

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

  // What new rows hold.
  void UploadFirstContents() {
    const InitialValue made(options_.initializer, options_.value_type, options_.dim);
    const Initializer& from = options_.initializer;
    initial_.kind = from.kind;
    initial_.value_type = options_.value_type;
    initial_.dim = options_.dim;
    initial_.value_bytes = value_bytes_;
    initial_.a = from.a;
    initial_.b = from.b;
    const float a = static_cast<float>(from.a);
    initial_.below32 = std::max(a, std::nextafter(static_cast<float>(from.b), a));
    initial_.below64 = std::max(from.a, std::nextafter(from.b, from.a));
    initial_.seed = from.seed;
    std::vector<char> rows;
    if (from.kind == Initializer::Kind::kConstant) {
      rows.resize(static_cast<size_t>(value_bytes_));
      made.Fill(0, rows.data());
    } else if (from.kind == Initializer::Kind::kRows) {
      rows = *from.rows;
      initial_.num_rows = Count(from.num_rows);
    }
    if (!rows.empty()) {
      initial_rows_ = Allocate(rows.size(), MemoryPlace::kDevice, "initial values");
      device_.Copy(initial_rows_.data(), rows.data(), rows.size());
      initial_.rows = initial_rows_.data();
    }
    std::vector<char> row(static_cast<size_t>(layout_.row_bytes));
    layout_.InitializeSlots(row.data());
    first_slots_ = Allocate(row.size(), MemoryPlace::kDevice, "initial values");
    device_.Copy(first_slots_.data(), row.data(), row.size());
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
    ++index_generation_;
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
    const int64_t left = std::max(int64_t{0}, options_.max_hbm - device_row_bytes_);
    const int64_t in_device = std::min(added, left / slab_bytes);
    Block device_rows;
    Block host_rows;
    if (in_device > 0) {
      device_rows = Allocate(Padded(in_device * slab_bytes), MemoryPlace::kDevice, "its rows");
    }
    if (in_device < added) {
      host_rows = Allocate(Padded((added - in_device) * slab_bytes), MemoryPlace::kPinnedHost,
                           "its rows, in pinned host memory");
    }
    Block stamps =
        Allocate(Count(added * slab_rows) * sizeof(DeviceStamp), MemoryPlace::kDevice, "its stamps");
    const size_t slabs = slabs_.size() + Count(added);
    Block table;
    const bool moves = slabs * sizeof(DeviceSlab) > slab_table_.bytes();
    if (moves) table = Allocate(2 * slabs * sizeof(DeviceSlab), MemoryPlace::kDevice, "its slabs");

    for (int64_t s = 0; s < added; ++s) {
      char* const at = s < in_device ? device_rows.data() + s * slab_bytes
                                     : host_rows.data() + (s - in_device) * slab_bytes;
      slabs_.push_back({at, stamps.template as<DeviceStamp>() + s * slab_rows});
    }
    if (moves) slab_table_ = std::move(table);
    device_.Copy(slab_table_.data(), slabs_.data(), slabs * sizeof(DeviceSlab));
    rows_.slabs = slab_table_.template as<DeviceSlab>();
    device_row_bytes_ += in_device * slab_bytes;
    host_row_bytes_ += (added - in_device) * slab_bytes;
    row_blocks_.push_back(std::move(device_rows));
    row_blocks_.push_back(std::move(host_rows));
    stamp_blocks_.push_back(std::move(stamps));
    row_capacity_ += added * slab_rows;
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

  void CheckPooled(const DeviceKeys& keys, Missing missing) const {
    CheckBatch(keys.n);
    RequireFloating();
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
      device_.Launch(Count(bags.bags * options_.dim),
                     PoolBody<T>{Ids<T>(keys, missing), bags.splits, Count(bags.bags),
                                 static_cast<Weight*>(bags.weights), bags.combiner, Count(options_.dim),
                                 static_cast<T*>(out)});
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
    if (admission != nullptr) device_.Launch(n, AdmitBody{Batch(keys), index_, *admission, numbers()});
    device_.Launch(n, InsertBody{Batch(keys), index_, rows_, numbers(), new_keys(), new_slots(), inserted,
                                 admission != nullptr});
    device_.Launch(n, PlaceNewBody{Batch(keys), index_, rows_, new_keys(), new_slots(), initial_, first_value,
                                   first_slots_.data() + value_bytes_, Alignment(Count(value_bytes_)),
                                   Alignment(Count(value_bytes_))});
    Settle(keys.n);
    if (!keys.distinct) device_.Launch(n, ResolveBody{Batch(keys), index_, numbers()});
  }

  void Settle(int64_t keys) {
    ++sequence_;
    if (keys > 0) queued_.push_back({sequence_, keys});
    queued_keys_ += keys;
    device_.Launch(1, SettleBody{rows_.counters, &words_.template as<Words>()->num_new,
                                 report_.template as<uint64_t>(), sequence_});
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

  int64_t ExportNext(const RowPredicate& predicate, uint64_t generation, uint64_t* next_bucket,
                     int64_t capacity, const DeviceExporter::Buffers& out, DeviceStream stream) {
    if (capacity < DeviceBucket::kKeys) {
      throw Error(ErrorCode::kInvalidArgument, "An export of table '" + options_.name + "' in chunks of " +
                                                   std::to_string(capacity) + " rows; expected at least " +
                                                   std::to_string(DeviceBucket::kKeys) + ".");
    }
    for (const ColumnOut& column : out.columns) layout_.At(column.column, column.width);
    const Operation operation(this, stream);
    if (generation != index_generation_) {
      throw Error(ErrorCode::kFailedPrecondition,
                  "Table '" + options_.name +
                      "' grew while it was exported. Export again, and insert nothing meanwhile.");
    }
    if (*next_bucket == index_.num_buckets) return -1;
    const uint64_t buckets =
        std::min(Count(capacity) / DeviceBucket::kKeys, index_.num_buckets - *next_bucket);
    const int64_t most = static_cast<int64_t>(buckets) * DeviceBucket::kKeys;
    PrepareScratch(most);
    uint32_t* const count = &words_.template as<Words>()->count;
    device_.Fill(count, 0, sizeof(uint32_t));
    device_.Launch(buckets, ListBody{index_, rows_, predicate, *next_bucket, *next_bucket + buckets, count,
                                     numbers(), out.keys, narrow_, out.freqs, out.versions, out.scores});
    for (const ColumnOut& column : out.columns) {
      const RowLayout::Column& c = layout_.columns[static_cast<size_t>(column.column)];
      CopyOut(numbers(), most, count, c.offset, c.bytes, column.data);
    }
    const int64_t rows = ReadCount();
    *next_bucket += buckets;
    return rows;
  }

  // Declared first, so that it outlives the memory.
  mutable Device device_;
  const DeviceTableOptions options_;
  const bool narrow_;
  const int64_t value_bytes_;
  const RowLayout layout_;

  Evictor<Device> evictor_;  // guarded by mutex_, its policy aside
  bool may_exceed_ = false;  // the present batch may leave more rows than a bounded table is to have

  mutable std::mutex mutex_;  // guards all below
  DeviceInitialValue initial_;
  Block initial_rows_;
  Block first_slots_;  // a row; its value means nothing

  Block buckets_;
  DeviceIndex index_;
  uint64_t index_generation_ = 0;

  std::vector<Block> row_blocks_;
  std::vector<Block> stamp_blocks_;
  std::vector<DeviceSlab> slabs_;  // what slab_table_ holds
  Block slab_table_;
  Block free_rows_;
  DeviceRows rows_;
  int64_t row_capacity_ = 0;
  int64_t device_row_bytes_ = 0;
  int64_t host_row_bytes_ = 0;
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
};

}  // namespace kvtable
