// The key-value table in device memory: what kvtable/table.h is on the CPU, on a GPU.
//
// The operations, their names and their semantics are those of Table, for any key value and with duplicate
// keys in a batch: a lookup returns the same row for each, an upsert lets the last win, an accumulate adds
// all (in no particular order: sums of three and more floats may differ in their last bits). What differs:
//
//   - Arrays are in device memory, unless said otherwise: memory that kernels on the table's device can read
//     and write.
//   - An operation takes a stream and returns when its work is queued there. Operations on one table run in
//     the order of the calls, whatever their streams. Arrays must stay until the work is done.
//   - Nothing waits for the device, and nothing allocates, except where the table grows: when the rows it may
//     have at most after a batch exceed its room, it waits for the operations before to learn how many rows
//     there are; and a batch larger than all before makes scratch memory. Reserve makes both rare.
//
// Operations may be called from any number of threads; the calls come one after the other. Nothing is
// dropped but by a table with a max_capacity, which evicts to the row what Table evicts, given the same
// clock: a table takes keys until memory ends, and then throws Error(kResourceExhausted), as it was before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvtable/bags.h"
#include "kvtable/eviction.h"
#include "kvtable/expiry.h"
#include "kvtable/initializer.h"
#include "kvtable/optimizer.h"
#include "kvtable/table.h"
#include "kvtable/types.h"

namespace kvtable {

// A CUDA stream, or null for the default one.
using DeviceStream = void*;

// Where device memory comes from, for those who have taken it all beforehand (as TensorFlow does).
class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  // Aligned to 256 bytes; null where there is no memory.
  virtual void* Allocate(size_t bytes) = 0;
  // Given back while the device may still use it: others get it for what they queue behind that.
  virtual void Free(void* memory) = 0;
};

struct DeviceTableOptions {
  std::string name;  // for messages
  KeyType key_type = KeyType::kInt64;
  ValueType value_type = ValueType::kFloat32;
  int64_t dim = 0;  // elements of a value
  Initializer initializer;
  std::vector<SlotSpec> slots;
  int64_t capacity_hint = 0;  // rows to make room for at once; growth is automatic
  // Bytes of device memory that rows may take; what is beyond lies in pinned host memory. Index and stamps
  // (24 bytes per row) are always in device memory.
  int64_t max_hbm = INT64_MAX;
  DeviceAllocator* allocator = nullptr;  // of device memory; it must outlive the table. Null: the driver's
  DeviceStream stream = nullptr;         // of the work of making the table
  // Where rows lie in host memory: after every 8 batches that insert or write, up to so many of the rows
  // there that were touched last change places with rows in device memory that were touched longer ago. That
  // is 22 short launches, which look at 64 places of the index for each row that may move. 0: never.
  int64_t move_hot_rows = 4096;
  // The most rows that a batch leaves behind; 0: any number. A bounded table takes 33 bytes more per row (its
  // score, for one), and a batch's rows come before others go: so there is room for as many more.
  int64_t max_capacity = 0;
  Eviction eviction = Eviction::kLru;   // of a bounded table
  EvictionClock clock;                  // of a bounded table; none: the system's
  std::optional<uint64_t> padding_key;  // as in TableOptions
  // The age at which rows go; none at first. An operation on keys has two more launches then.
  Expiry expiry;
};

struct DeviceKeys {
  const void* keys = nullptr;  // (n) of the table's key type
  int64_t n = 0;
  bool distinct = false;  // the caller knows that no key occurs twice, which saves an upsert some work
};

// What a batch evicts goes here, the lowest score first; of a batch with more keys than the capacity, its own
// earliest rows come last. All is in device memory.
struct DeviceEvicted {
  void* keys = nullptr;        // (capacity) key type; these three may be null
  void* values = nullptr;      // (capacity, dim)
  uint64_t* scores = nullptr;  // (capacity)
  int64_t capacity = 0;        // rows there is room for; no batch evicts more rows than it has keys
  uint64_t* count = nullptr;   // one: how many rows went, written or not; may be null

  bool WantsRows() const {
    return capacity > 0 && (keys != nullptr || values != nullptr || scores != nullptr);
  }
};

// How a training lookup inserts missing keys: kvtable/table.h's Insertion, in device memory.
struct DeviceInsertion {
  Stamp stamp;
  bool* inserted = nullptr;                // (n) or null: true for each occurrence of a key that was new
  double admission = 1.0;                  // the probability that a missing key is inserted
  uint64_t admission_seed = 0;             // give each call another
  Missing below = Missing::kZeros;         // or kInitial: what a key gives that is not admitted
  const DeviceEvicted* evicted = nullptr;  // null: what goes is lost
};

// Which rows are meant: those that meet every one of these conditions, which are all true at first. The
// bounds are among what they bound.
struct RowPredicate {
  enum class Test : uint8_t { kAll, kFrequencyBelow, kFrequencyAtLeast, kVersionBelow, kVersionAtLeast };

  RowPredicate() = default;
  // A single condition: {RowPredicate::Test::kVersionAtLeast, step}.
  RowPredicate(Test test, uint32_t bound) {
    const bool of_frequency = test == Test::kFrequencyBelow || test == Test::kFrequencyAtLeast;
    uint32_t* const least = of_frequency ? &least_frequency : &least_version;
    uint32_t* const most = of_frequency ? &most_frequency : &most_version;
    if (test == Test::kFrequencyAtLeast || test == Test::kVersionAtLeast) {
      *least = bound;
    } else if (test != Test::kAll) {
      *least = bound == 0 ? 1 : 0;  // nothing is below 0
      *most = bound == 0 ? 0 : bound - 1;
    }
  }

  uint32_t least_frequency = 0;
  uint32_t most_frequency = UINT32_MAX;
  uint32_t least_version = 0;
  uint32_t most_version = UINT32_MAX;
  uint64_t least_score = 0;  // all scores are 0 where the table is not bounded
  uint64_t most_score = UINT64_MAX;
  // Of the key, as 64 bits (an int32 is sign-extended), what the mask leaves: from least to most as unsigned
  // numbers.
  uint64_t key_mask = UINT64_MAX;
  uint64_t least_key = 0;
  uint64_t most_key = UINT64_MAX;
};

// Which rows Shrink removes first; of rows whose stamps are the same, those with the lowest keys, as unsigned
// numbers.
enum class ShrinkOrder : uint8_t {
  kOldest,         // the lowest version, then the lowest frequency
  kLeastFrequent,  // the lowest frequency, then the lowest version
};

// Which keys are combined into one row: bag b has the keys [splits[b], splits[b + 1]) of a batch.
struct DeviceBags {
  // (bags + 1): rising from 0 to the number of keys. Others do no harm beyond the rows that come out: see
  // CheckBags.
  const int64_t* splits = nullptr;
  int64_t bags = 0;
  const void* weights = nullptr;  // (n), double for tables of double, else float; or null: all are 1
  Combiner combiner = Combiner::kSum;
  // For SpreadGradient, which is not given the keys: how many there are, so that its splits are held to that.
  int64_t ids = INT64_MAX;
};

struct DeviceMemoryUse {
  int64_t rows = 0;           // live rows
  int64_t row_bytes = 0;      // live rows x (value and slots)
  int64_t index_bytes = 0;    // buckets
  int64_t column_bytes = 0;   // stamps of all rows that there is room for, and the list of free rows
  int64_t slack_bytes = 0;    // row bytes of room not used
  int64_t scratch_bytes = 0;  // for the largest batch so far
  int64_t host_bytes = 0;     // of all row bytes, in pinned host memory
};

// Reads a table in chunks, of which any operation may come between: it may grow, and change its slots. A row
// that is there throughout comes exactly once; rows that are inserted meanwhile may be left out. No key comes
// twice.
class DeviceExporter {
 public:
  struct Buffers {
    void* keys = nullptr;          // (n) key type; each pointer may be null
    uint32_t* freqs = nullptr;     // (n)
    uint32_t* versions = nullptr;  // (n)
    uint64_t* scores = nullptr;    // (n); zeros where the table is not bounded
    uint64_t* orders = nullptr;    // (n), likewise: of equal scores the lowest goes first
    std::vector<ColumnOut> columns;
  };
  virtual ~DeviceExporter() = default;

  // At least the number of rows still to come, as long as nothing is inserted. Waits for nothing.
  virtual int64_t max_rows() const = 0;

  // Writes up to `capacity` rows, which is at least 1, and returns how many: 0 at the end. Waits for them.
  // Throws Error(kFailedPrecondition) where a column is not the one that was looked up, or not as wide.
  virtual int64_t Next(int64_t capacity, const Buffers& out, DeviceStream stream) = 0;
};

class DeviceTable {
 public:
  virtual ~DeviceTable() = default;

  // As the table was made, but for the slots and the initializer, which are those it has now. While another
  // thread may change these, read them by the functions below.
  virtual const DeviceTableOptions& options() const = 0;
  virtual Initializer initializer() const = 0;
  virtual RowSchema schema() const = 0;
  std::vector<SlotSpec> slots() const { return schema().slots; }
  uint64_t generation() const { return schema().generation; }

  // Waits for the operations before.
  virtual int64_t Size() const = 0;
  virtual DeviceMemoryUse Memory() const = 0;

  // ---- Lookups

  // `defaults` is used with Missing::kDefault: (num_defaults, dim), row i % num_defaults for key i. `found`
  // may be null: (n).
  virtual void Gather(const DeviceKeys& keys, void* out /* (n, dim) */, Missing missing, const void* defaults,
                      int64_t num_defaults, bool* found, DeviceStream stream) = 0;

  // A missing key is inserted with its initial value and stamped, as `insertion` says; rows that are there
  // are read.
  virtual void GatherOrInsert(const DeviceKeys& keys, void* out /* (n, dim) */,
                              const DeviceInsertion& insertion, DeviceStream stream) = 0;
  void GatherOrInsert(const DeviceKeys& keys, void* out, Stamp stamp, bool* inserted, DeviceStream stream) {
    DeviceInsertion insertion;
    insertion.stamp = stamp;
    insertion.inserted = inserted;
    GatherOrInsert(keys, out, insertion, stream);
  }

  // Any columns. A missing key gives initial values in every column, as an insert would. `found` may be null:
  // (n).
  virtual void GatherColumns(const DeviceKeys& keys, const std::vector<ColumnOut>& out, bool* found,
                             DeviceStream stream) = 0;

  // Where each key's row lies, null where it is missing: the value, and the slots behind it. Holds until the
  // key is removed or evicted, or EnsureSlots changes the slots. In a table with rows in host memory
  // (Memory().host_bytes) it ends at MoveHotRows, too, and, unless options().move_hot_rows is 0, with the
  // next operation that inserts or writes.
  virtual void Pointers(const DeviceKeys& keys, void** out /* (n) */, DeviceStream stream) = 0;
  virtual void PointersOrInsert(const DeviceKeys& keys, void** out /* (n) */, Stamp stamp, bool* inserted,
                                DeviceStream stream) = 0;

  // Pooled lookups, of floating values: a row for each bag, summed in the order of its keys (in float for
  // 16-bit values). Of a missing key `missing` says what counts, zeros or its initial value; or it is
  // inserted, and stamped.
  virtual void GatherPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing,
                            void* out /* (bags, dim) */, DeviceStream stream) = 0;
  virtual void GatherPooledOrInsert(const DeviceKeys& keys, const DeviceBags& bags, Stamp stamp,
                                    void* out /* (bags, dim) */, DeviceStream stream) = 0;

  // The splits of sparse indices: bag b has those entries whose row id is b. Row ids are `stride` apart (the
  // rank of a SparseTensor, whose indices are (n, rank)); they rise, from 0 to bags - 1, which CheckBags
  // tells.
  virtual void MakeSplits(const int64_t* row_ids, int64_t stride, int64_t n, int64_t bags,
                          int64_t* splits /* (bags + 1) */, DeviceStream stream) = 0;

  // Throws Error(kInvalidArgument) where splits or row ids that an operation was given since the last call of
  // this are not as they have to be; what that operation gave means nothing then. Waits for the operations
  // before.
  virtual void CheckBags(DeviceStream stream) = 0;

  // The gradient of a pooled lookup with respect to the row of each key, given that with respect to what was
  // pooled.
  virtual void SpreadGradient(const DeviceBags& bags, const void* gradient /* (bags, dim) */,
                              void* out /* (n, dim) */, DeviceStream stream) = 0;

  // The gradient with respect to the weights, which there must be: `pooled` is what the lookup gave.
  virtual void WeightsGradient(const DeviceKeys& keys, const DeviceBags& bags, Missing missing,
                               const void* pooled /* (bags, dim) */, const void* gradient /* (bags, dim) */,
                               void* out /* (n) as the weights */, DeviceStream stream) = 0;

  virtual void Contains(const DeviceKeys& keys, bool* out /* (n) */, DeviceStream stream) = 0;

  // Which row each key has, kNoPosition where it is missing: a number that holds as long as Pointers does.
  virtual void Positions(const DeviceKeys& keys, uint64_t* out /* (n) */, DeviceStream stream) = 0;

  // Zeros where missing. Each pointer may be null.
  virtual void GatherStamps(const DeviceKeys& keys, uint32_t* freqs, uint32_t* versions,
                            DeviceStream stream) = 0;

  // ---- Writes

  // Writes the value; a new row's slots get their initial values.
  virtual void Upsert(const DeviceKeys& keys, const void* values /* (n, dim) */, Stamp stamp,
                      DeviceStream stream) = 0;

  // The same, and hands out what the batch evicts. `scores` may be null: (n), those of the keys, the last of
  // equal keys' counting; they need kCustom.
  virtual void InsertAndEvict(const DeviceKeys& keys, const void* values /* (n, dim) */,
                              const uint64_t* scores, Stamp stamp, const DeviceEvicted& evicted,
                              DeviceStream stream) = 0;

  // Writes the named columns; columns of a new row that are not named get their initial values.
  virtual void UpsertColumns(const DeviceKeys& keys, const std::vector<ColumnIn>& in, Stamp stamp,
                             DeviceStream stream) = 0;

  // value += delta. A missing key starts from its initial value, or from zeros where `from_zeros`.
  virtual void Accumulate(const DeviceKeys& keys, const void* deltas /* (n, dim) */, bool from_zeros,
                          Stamp stamp, DeviceStream stream) = 0;

  // The same with another operation, of floating values; a missing key starts from its initial value.
  virtual void Combine(const DeviceKeys& keys, const void* operands /* (n, dim) */, RowOp op, Stamp stamp,
                       DeviceStream stream) = 0;

  // One training step on rows: each distinct key's row is found once and updated in place, value and slots,
  // by the sum of the gradients of its occurrences, in the order of the batch and in what the rule computes
  // in (float32 for 16-bit types): to the bit what Table::Apply does, but for powers (ftrl with a
  // learning_rate_power other than -0.5). A missing key is inserted first. Each updated row is stamped once.
  // Where keys.distinct, nothing is sorted. `slots` are the columns of the rule's slots, each as wide as the
  // value. Throws Error(kInvalidArgument) as CheckUpdate does.
  virtual void Apply(const DeviceKeys& keys, const void* gradients /* (n, dim) */, const Update& update,
                     const SlotColumns& slots, Stamp stamp, DeviceStream stream) = 0;

  // As Table::IncreaseFrequency.
  virtual void IncreaseFrequency(const DeviceKeys& keys, const uint32_t* by /* (n) */,
                                 DeviceStream stream) = 0;

  // Row updates left out so far because of gradients that are not finite (Update::skip_nonfinite). Waits for
  // the operations before.
  virtual int64_t SkippedUpdates() const = 0;

  // Whether each key's row is zeros because an optimizer's penalty made it so, or because it came as zeros
  // from an import; the next write to the row ends that. False for a missing key.
  virtual void Zeroed(const DeviceKeys& keys, bool* out /* (n) */, DeviceStream stream) = 0;
  // Waits for the operations before.
  virtual int64_t ZeroedRows() = 0;

  // Upserts rows with their stamps, as an export gave them. freqs and versions may be null: zeros. A bounded
  // table takes `ranks` along; where they have no scores, it goes by the stamps, as Table::Import does.
  virtual void Import(const DeviceKeys& keys, const std::vector<ColumnIn>& in, const uint32_t* freqs,
                      const uint32_t* versions, const RanksIn& ranks, DeviceStream stream) = 0;

  // ---- Bounded tables; see kvtable/eviction.h

  // Rows evicted so far to keep the capacity. Waits for the operations before.
  virtual int64_t EvictedCount() const = 0;

  // The score of each key's row; 0 where it is missing, or the table is not bounded.
  virtual void Scores(const DeviceKeys& keys, uint64_t* out /* (n) */, DeviceStream stream) = 0;

  // Sets the scores of the keys that are there, the last of equal keys' counting. Throws
  // Error(kFailedPrecondition) unless the table evicts by kCustom.
  virtual void SetScores(const DeviceKeys& keys, const uint64_t* scores /* (n) */, DeviceStream stream) = 0;

  // The epoch of the operations to come. Throws Error(kFailedPrecondition) unless the table evicts by epochs.
  virtual void SetEpoch(uint32_t epoch) = 0;
  virtual uint32_t epoch() const = 0;  // 0 where it does not

  // ---- Expiry; as Table has it

  virtual uint32_t Now() const = 0;
  virtual void SetStep(uint32_t step) = 0;

  // `removed` may be null: how many rows went.
  virtual void EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows, uint64_t* removed,
                          DeviceStream stream) = 0;

  // Adds the rows of a slice to `counts` (RankDigit::kValues), in device memory.
  virtual void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, uint32_t* counts,
                          DeviceStream stream) = 0;

  virtual int64_t PassLength() const = 0;

  // Rows that have gone by age, norm, frequency or rank. Waits for the operations before.
  virtual int64_t ExpiredCount() const = 0;

  // ---- Rows that go, and room

  // Absent keys are ignored. `removed` may be null: how many rows were there and are gone.
  virtual void Remove(const DeviceKeys& keys, uint64_t* removed, DeviceStream stream) = 0;
  virtual void RemoveIf(const RowPredicate& predicate, uint64_t* removed, DeviceStream stream) = 0;
  void Remove(const DeviceKeys& keys, DeviceStream stream) { Remove(keys, nullptr, stream); }
  void RemoveIf(const RowPredicate& predicate, DeviceStream stream) { RemoveIf(predicate, nullptr, stream); }

  // Removes rows until `rows` are left, where there are more. It reads the index and the stamps 17 times:
  // call it when there is a good deal to remove, not for each batch.
  virtual void Shrink(int64_t rows, ShrinkOrder order, DeviceStream stream) = 0;

  // Lets up to `most` rows in host memory change places with rows in device memory that were touched longer
  // ago (a lower version; of one version, a lower frequency), the last touched first. What a table does by
  // itself (options().move_hot_rows) looks at some of the index at a time; this looks at all of it, 11 times:
  // call it when traffic changed, or after an import, not for each batch. Waits for nothing.
  virtual void MoveHotRows(int64_t most, DeviceStream stream) = 0;

  // Whether each key has a row, and in device memory.
  virtual void InDeviceMemory(const DeviceKeys& keys, bool* out /* (n) */, DeviceStream stream) = 0;

  // Removes all rows, and keeps the memory for others.
  virtual void Clear(DeviceStream stream) = 0;

  // Makes room for this many rows in all, and batches of this many keys, so that inserting them waits for
  // nothing.
  virtual void Reserve(int64_t rows, int64_t batch, DeviceStream stream) = 0;

  // Makes the slots exactly these, in this order: a slot of the same name and width keeps its contents, a new
  // one starts from its initial value, others are dropped. Returns the new generation; a no-op keeps it. An
  // operation that names a column the row does not have, or gives it another width, throws
  // Error(kFailedPrecondition).
  //
  // Rows change where they lie, so that it takes no second table: wider rows need what they grow by, and
  // narrower ones nothing but some megabytes. Where there is no memory, it throws Error(kResourceExhausted)
  // and the table is as it was. Waits for the operations before and for its own work; pointers to rows end.
  virtual uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, DeviceStream stream) = 0;

  // Replaces the initial values of rows not yet there, for the operations after. Throws
  // Error(kInvalidArgument) on parameters that make no distribution.
  virtual void SetInitializer(const Initializer& initializer, DeviceStream stream) = 0;

  // The table must outlive it.
  virtual std::unique_ptr<DeviceExporter> Export(const RowPredicate& predicate) = 0;

  // ---- What changed, and exports of one moment: as Table has them
  //
  // Tracking takes 8 bytes of device memory for each row that there is room for, and 16 for each that may go
  // from one cut to the next (as many as the rows, or max_removed). Finding what changed reads the index and
  // these columns once. What is written through Pointers is not noted.
  //
  // An export of one moment gives rows in host memory. When it begins it copies as many as half of its
  // AsideMemory holds; while others are still to come, operations that write wait.

  virtual std::unique_ptr<Exporter> ExportMoment(const MomentOptions& options, DeviceStream stream) = 0;
  virtual uint64_t TrackChanges(int64_t max_removed) = 0;
  virtual bool tracks_changes() const = 0;
  virtual uint64_t CutChanges() = 0;
  virtual std::string ChangesLost(uint64_t since) const = 0;
  virtual void ForgetChanges(uint64_t upto) = 0;
};

// A table on the current CUDA device. Throws Error(kFailedPrecondition) where there is none, or where the
// library was built without CUDA.
std::unique_ptr<DeviceTable> MakeCudaTable(const DeviceTableOptions& options);

}  // namespace kvtable
