// The key-value table: a map from a key to one row, on the CPU.
//
// A row holds the value and, beside it, every optimizer slot, so that an update finds its key once and
// touches one run of memory. Frequency, version and the key itself live in columns parallel to the rows.
//
// Every operation takes a batch and a ParallelFor that lends it threads. Keys are arrays of the table's key
// type, rows are row-major arrays of its value type; shapes are given in trailing comments. All operations
// may be called from any number of threads at once: each sees and leaves every row whole.
//
// Duplicate keys in a batch: gather returns the same row for each; upsert lets the last win; accumulate adds
// all; a training step sums their gradients and updates the row once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvtable/admission.h"
#include "kvtable/eviction.h"
#include "kvtable/expiry.h"
#include "kvtable/initializer.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {

// One optimizer slot, kept in the row behind the value in the table's value type.
struct SlotSpec {
  enum class Init : uint8_t {
    kConstant,   // every element is `constant`
    kCopyValue,  // the row's value at the time the slot comes to be (needs width == dim)
  };
  std::string name;
  int64_t width = 0;  // elements
  Init init = Init::kConstant;
  double constant = 0.0;

  bool operator==(const SlotSpec& o) const {
    return name == o.name && width == o.width && init == o.init && constant == o.constant;
  }
};

struct TableOptions {
  KeyType key_type = KeyType::kInt64;
  ValueType value_type = ValueType::kFloat32;
  int64_t dim = 0;  // elements of a value
  Initializer initializer;
  std::vector<SlotSpec> slots;
  int64_t capacity_hint = 0;  // rows to make room for at once; growth is automatic
  // A power of two up to 64; 0 takes four per CPU, at least 8. Parts of one variable in one process share these out, with
  // two each at least: a lookup that reads all of them reads no more places than that of a variable in one part.
  int shards = 0;
  int64_t parts_beside = 1;  // parts of its variable that are in this process, itself included
  bool huge_pages = true;    // ask for 2 MiB pages where the system gives them
  // The most rows that a batch leaves behind; 0: any number. A bounded table keeps a score for each row,
  // which costs up to 22 bytes, and lets one batch at a time change rows. While a batch runs there may be as
  // many rows more as it has keys.
  int64_t max_capacity = 0;
  Eviction eviction = Eviction::kLru;  // of a bounded table
  EvictionClock clock;                 // of a bounded table; none: the system's
  Expiry expiry;                       // the age at which rows go; none at first
  // A key (widened) that never has a row: its initial value is zeros, and writes leave it out.
  std::optional<uint64_t> padding_key;
  // A table that outgrows its memory: rows beyond `max_memory` bytes of them lie in a file in the folder `spill`, those
  // that training wants least. 0, and no folder: all rows are in memory. What leads to rows and their stamps always is, and
  // costs what it does elsewhere, with 4 bytes more. The file has no name: it goes with the table or its process.
  // Operations throw Error(kResourceExhausted) where it cannot grow, and Error(kFailedPrecondition) where it cannot be
  // read; rows then stay as they are, as where memory runs out.
  int64_t max_memory = 0;
  std::string spill;
  std::string name;  // of the table, for messages about the folder
};

// Where a row lies: shard << 32 | row. It holds for as long as the key keeps its row, which is until the key
// is removed: whoever uses one later compares the key that lies beside the row.
inline constexpr uint64_t kNoPosition = UINT64_MAX;  // the key has no row

// Where a lookup writes: what belongs to key i goes to place i of these arrays, or to place where[i]. Rows are of the
// table's value type; or `widened` from 16 bits to float32, which tables in device memory do not do: they throw
// Error(kFailedPrecondition), and tables of other value types Error(kInvalidArgument).
struct RowsOut {
  // Rows alone are the usual case, so they convert.
  RowsOut(void* rows_out, uint64_t* positions_out = nullptr,  // NOLINT(google-explicit-constructor)
          const uint32_t* where_out = nullptr, bool widened_out = false)
      : rows(static_cast<char*>(rows_out)),
        positions(positions_out),
        where(where_out),
        widened(widened_out) {}

  int64_t PlaceOf(int64_t i) const { return where == nullptr ? i : where[i]; }
  RowsOut WithPlaces(const uint32_t* places) const { return {rows, positions, places, widened}; }
  int64_t row_bytes(ValueType type, int64_t dim) const {
    return dim * SizeOf(widened ? ValueType::kFloat32 : type);
  }

  char* rows;             // (places, dim) of the value type, or of float32
  uint64_t* positions;    // (places) or null; kNoPosition where a lookup finds no row
  const uint32_t* where;  // (n) or null
  bool widened;
};

// The gradients of a batch: of key i row i of `rows`, or row places[i], so that several tables can have theirs in one
// array. Places are not for tables in device memory, which throw Error(kFailedPrecondition).
struct GradientsIn {
  // Rows alone are the usual case, so they convert.
  GradientsIn(const void* rows_in,  // NOLINT(google-explicit-constructor)
              const uint32_t* places_in = nullptr)
      : rows(rows_in), places(places_in) {}

  const void* rows;        // (places, dim)
  const uint32_t* places;  // (n) or null
};

// How a write stamps the rows it touches: frequency grows by the number of times the key occurs in the batch
// times `frequency`, version becomes `version` (the caller's step or Unix time in seconds; in a table whose
// rows age it is the table's own).
struct Stamp {
  uint32_t frequency = 0;
  uint32_t version = 0;
  bool existing_only = false;  // keys without a row are left out
  // The write ends a training step, as Apply does by itself: see AgeUnit::kSteps.
  bool ends_step = false;
  // The write is no use of its rows: they keep frequency, version and rank. Only where keys without a row are left out,
  // and of UpsertColumns.
  bool is_rewrite = false;
};

// How a training lookup inserts missing keys.
struct Insertion {
  Stamp stamp;  // of new rows (frequency counted by occurrences)
  // May be null: (n) in the order of the keys, true for each occurrence of a key that was new.
  bool* inserted = nullptr;
  // The probability that a missing key is inserted. Whether it is, is a function of seed and key: give each
  // call another seed.
  double admission = 1.0;
  uint64_t admission_seed = 0;
  EvictedRows* evicted = nullptr;  // may be null: takes the rows that this batch evicts
  // Null, or what counts the missing keys, and admits some: those become rows, with their counts as frequency.
  Admitter* admitter = nullptr;
  Missing below = Missing::kZeros;  // or kInitial: what a key gives that is not inserted, with kNoPosition
};

// What training lookups (GatherOrInsert) found; -1 where nobody counts, as in a table in device memory.
struct LookupCounts {
  int64_t keys = -1;       // that were asked for, duplicates included
  int64_t born = -1;       // rows that were made for them
  int64_t held_back = -1;  // keys, duplicates included, that were not there and not admitted
};

// The slots that the rows of a table have at one moment. Each change of them is another generation.
struct RowSchema {
  std::vector<SlotSpec> slots;
  uint64_t generation = 0;
};

// Columns are numbers: 0 is the value, i + 1 is slot i. Who found a number by a slot's name gives along the
// generation of the schema in which it was found. Where another slot has come to that place since, or none is
// there any more, the operation throws Error(kFailedPrecondition) and neither reads nor writes the column.
// Slots that stayed where they were are the same ones in every later generation.
inline constexpr uint64_t kAnyGeneration = 0;  // the columns as they are when the operation meets them

// One column of the row in a multi-column operation. A column of another width is such an error, too.
struct ColumnOut {
  int column;
  void* data;     // (n, width)
  int64_t width;  // elements
  uint64_t generation = kAnyGeneration;
};
struct ColumnIn {
  int column;
  const void* data;  // (n, width)
  int64_t width;     // elements
  uint64_t generation = kAnyGeneration;
};

// The columns of an optimizer's slots, in the order of its rule.
struct SlotColumns {
  SlotColumns(std::vector<int> numbers = {},  // NOLINT(google-explicit-constructor)
              uint64_t found_in = kAnyGeneration)
      : columns(std::move(numbers)), generation(found_in) {}

  std::vector<int> columns;
  uint64_t generation;
};

struct MemoryUse {
  int64_t rows = 0;          // live rows
  int64_t row_bytes = 0;     // live rows in memory x (value and slots)
  int64_t index_bytes = 0;   // buckets
  int64_t column_bytes = 0;  // key, frequency, version and liveness of all rows handed out
  int64_t slack_bytes = 0;   // row bytes of removed rows and of pages touched but not yet used
  // Of a table that spills: rows that are in its file only, what that takes of the disk, and how many rows have been
  // read from it and written to it so far.
  int64_t spilled_rows = 0;
  int64_t file_bytes = 0;
  int64_t rows_read = 0;
  int64_t rows_written = 0;
  // Bytes per live row beyond the row itself.
  double overhead_per_row() const {
    return rows == 0 ? 0.0 : static_cast<double>(index_bytes + column_bytes + slack_bytes) / rows;
  }
};

class Table;

// Where exports of one moment keep the rows that change before their turn; several may share one. Where more
// than `bytes` lie there, who wants to change rows waits until an export has taken some. (Batches that run by
// then go on: each puts its share of rows aside.) Where nothing was taken for `patience`, those who wait give
// the export up, and it fails.
class AsideMemory {
 public:
  static constexpr int64_t kDefaultBytes = int64_t{128} << 20;

  explicit AsideMemory(int64_t bytes = kDefaultBytes,
                       std::chrono::milliseconds patience = std::chrono::seconds(60))
      : limit_(bytes), patience_(patience), progress_(std::chrono::steady_clock::now()) {}

  int64_t used() const { return used_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }

  // For tables. Grow never waits. AwaitRoom waits a while for room, and is false where patience ran out.
  bool IsFull() const { return used() > limit_; }
  void Grow(int64_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }
  void Shrink(int64_t bytes);
  void NoteProgress();
  bool IsStuck() const;  // for longer than `patience`
  bool AwaitRoom();

 private:
  const int64_t limit_;
  const std::chrono::milliseconds patience_;
  std::atomic<int64_t> used_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point progress_;
};

// An export of the rows as they are at one moment; see Table::ExportMoment.
struct MomentOptions {
  // Only the rows that changed since this version of the table, and the keys that went: an increment.
  std::optional<uint64_t> since;
  // Whether the moment ends a version, as CutChanges does. An increment always does.
  bool cut = false;
  std::shared_ptr<AsideMemory> aside;  // null: one of its own
};

// Reads a table in chunks, each row whole, as it is when its turn comes (or as it was at one moment:
// Table::ExportMoment). Rows that were there when the exporter was made come, unless they go before their turn;
// rows inserted since are left out (or may be, of a table in device memory). No key comes twice. The table must
// outlive its exporters.
class Exporter {
 public:
  struct Buffers {
    void* keys = nullptr;          // (n) key type; each pointer may be null
    uint32_t* freqs = nullptr;     // (n)
    uint32_t* versions = nullptr;  // (n)
    uint64_t* scores = nullptr;    // (n); zeros where the table is not bounded
    uint64_t* orders = nullptr;    // (n), likewise: of equal scores the lowest goes first
    std::vector<ColumnOut> columns;
  };
  virtual ~Exporter() = default;

  // At least the number of rows still to come.
  virtual int64_t max_rows() const = 0;

  // Writes up to `capacity` rows and returns how many: 0 at the end. Of an export of one moment it may be called
  // from several threads at once, each until it gives 0.
  virtual int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) = 0;

  // ---- Of an export of one moment

  // Whether those who change rows wait for some to be taken, or soon will: for who takes rows of several tables.
  virtual bool IsUrgent() const { return false; }
  // Says that rows will be taken, only later: it is not given up for now.
  virtual void KeepAlive() {}
  // The version that the moment ended, where it ended one; else 0.
  virtual uint64_t version() const { return 0; }
  // Of an increment, when all rows have come: how many of them were born since the version from which it goes
  // (also: born anew), and the keys that were there then and are not at the moment.
  virtual int64_t born_rows() const { return 0; }
  virtual int64_t removed_rows() const { return 0; }
  virtual void RemovedKeys(void* /* (removed_rows()) */) const {}
};

class Table {
 public:
  // Throws Error(kInvalidArgument) on impossible options.
  static std::unique_ptr<Table> Create(const TableOptions& options);
  virtual ~Table() = default;

  virtual KeyType key_type() const = 0;
  virtual ValueType value_type() const = 0;
  virtual int64_t dim() const = 0;
  virtual Initializer initializer() const = 0;
  virtual RowSchema schema() const = 0;
  std::vector<SlotSpec> slots() const { return schema().slots; }
  // That of schema(): changes whenever the slots do.
  virtual uint64_t generation() const = 0;

  virtual int64_t Size() const = 0;
  virtual MemoryUse Memory() const = 0;
  // The most cache lines of the index that the lookup of a present key reads. Scans the index.
  virtual int MaxProbeLength() const = 0;

  // ---- Lookups

  // Read-only. `defaults` is used with Missing::kDefault: (num_defaults, dim), row i % num_defaults for key
  // i. `found` may be null: (n), in the order of the keys.
  virtual void Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
                      int64_t num_defaults, bool* found, ParallelFor& threads) const = 0;

  // Training lookup: a missing key is inserted with its initial value, as `insertion` says; rows that are
  // there are read and not stamped.
  virtual void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                              ParallelFor& threads) = 0;
  void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, Stamp stamp, bool* inserted,
                      ParallelFor& threads) {
    Insertion insertion;
    insertion.stamp = stamp;
    insertion.inserted = inserted;
    GatherOrInsert(keys, n, out, insertion, threads);
  }

  // Read-only, any columns. A missing key gives initial values in every column, as an insert would.
  virtual void GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                             ParallelFor& threads) const = 0;

  virtual void Contains(const void* keys, int64_t n, bool* out /* (n) */, ParallelFor& threads) const = 0;

  // Frequency and version columns of keys; zeros where missing. Each pointer may be null.
  virtual void GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                            ParallelFor& threads) const = 0;

  // Where each key's row lies; kNoPosition where it is missing.
  virtual void Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const = 0;

  // The keys of rows that are there, by position.
  virtual void KeysAt(const uint64_t* positions, int64_t n, void* keys) const = 0;

  // ---- Writes

  // Writes the value; a new row's slots get their initial values.
  virtual void Upsert(const void* keys, int64_t n, const void* values /* (n, dim) */, Stamp stamp,
                      ParallelFor& threads) = 0;

  // Writes the named columns; columns of a new row that are not named get their initial values.
  virtual void UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                             ParallelFor& threads) = 0;

  // value += delta, for duplicates one after the other in the order of the batch. A missing key starts from
  // its initial value, or from zeros where `from_zeros`.
  virtual void Accumulate(const void* keys, int64_t n, const void* deltas /* (n, dim) */, bool from_zeros,
                          Stamp stamp, ParallelFor& threads) = 0;

  // The same with another operation, of floating values; a missing key starts from its initial value.
  virtual void Combine(const void* keys, int64_t n, const void* operands /* (n, dim) */, RowOp op,
                       Stamp stamp, ParallelFor& threads) = 0;

  // One training step on rows: each distinct key's row is found once and updated in place, value and slots,
  // by the sum of the gradients of its occurrences (summed in the order of the batch). A missing key is
  // inserted first, its initial value being what the gradient was taken at. Each updated row is stamped once.
  //
  // `positions` may be null: (n), where a lookup found each key (see kNoPosition); a key that is not there
  // any more is looked up again. `slots` are the columns of the rule's slots, each as wide as the value. Where
  // one is not there any more, throws Error(kFailedPrecondition) and has changed no row.
  virtual ApplyCounts Apply(const void* keys, const uint64_t* positions, int64_t n,
                            const GradientsIn& gradients, const Update& update, const SlotColumns& slots,
                            Stamp stamp, ParallelFor& threads) = 0;

  // Whether each key's row is zeros because an optimizer's penalty made it so, or because it came as zeros
  // from an import; the next write to the row ends that. False for a missing key.
  virtual void Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const = 0;
  virtual int64_t ZeroedRows() const = 0;

  // Row updates left out so far because of gradients that are not finite (Update::skip_nonfinite).
  virtual int64_t SkippedUpdates() const = 0;

  // Adds to the frequencies of the rows that are there: no touch, and no write. The sum stays at its largest.
  virtual void IncreaseFrequency(const void* keys, int64_t n, const uint32_t* by, ParallelFor& threads) = 0;

  // Of training lookups so far.
  virtual LookupCounts lookup_counts() const { return {}; }

  // Returns how many rows were there and are gone. Absent keys are ignored.
  virtual int64_t Remove(const void* keys, int64_t n, ParallelFor& threads) = 0;

  virtual void Clear() = 0;

  // Makes room for this many rows in all, so that inserting them rebuilds nothing.
  virtual void Reserve(int64_t rows, ParallelFor& threads) = 0;

  // ---- Slots

  // Makes the slots exactly these, in this order: a slot of the same name and width keeps its contents, a new
  // one starts from its initial value, others are dropped. Rebuilds one shard at a time under its lock; other
  // operations go on meanwhile and see each shard before or after, but for those that write slots (Apply,
  // UpsertColumns, Import): it waits for them, and they for it. Returns the new generation; a no-op keeps it.
  // Either all rows change or, where it throws (Error(kResourceExhausted), std::bad_alloc), none. An operation
  // that names a column the row does not have throws Error(kFailedPrecondition).
  virtual uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) = 0;

  // ---- Export and import

  virtual std::unique_ptr<Exporter> Export() const = 0;

  // Rows, slots, stamps and scores as they are when the exporter is made, between two batches of each shard, or
  // between two batches of a bounded table. Who is about to change or remove a row that has not come yet first
  // copies it aside (see AsideMemory); Clear and a change of slots wait for the export to end. Several may be
  // open at once. Who takes the rows must not be who changes them, or wait for him: take them on a thread of
  // their own.
  // Throws Error(kFailedPrecondition) where changes since `options.since` are not known (ChangesLost) or the
  // table cannot do this; Next does where the export was given up.
  // Of a table in device memory who changes rows waits while more are to come than lie aside (device_table.h).
  virtual std::unique_ptr<Exporter> ExportMoment(const MomentOptions& options) = 0;

  // ---- What changed
  //
  // A table that tracks its changes knows which rows were written, born or removed since a version. Versions
  // are numbers that grow, and no two tables of a process have one in common. Any write to a row counts, also
  // one of the same bytes, of its stamp alone or of its score. It takes a bit per row that changed and one per
  // row that was born, in pieces of 512 bytes for 4096 rows, for each version that is kept, at most
  // kMostVersions; and 12 bytes for each removed key, at most max_removed of them.
  static constexpr int kMostVersions = 8;

  // Begins to track, and returns a version: what changes from now on has changed since it. A table that does
  // already goes on.
  virtual uint64_t TrackChanges(int64_t max_removed) = 0;
  virtual bool tracks_changes() const = 0;

  // Ends a version and returns its number: what changes from now on has changed since it. Where kMostVersions
  // are kept already, the oldest is forgotten.
  virtual uint64_t CutChanges() = 0;

  // Why ExportMoment({since}) would be refused, as a sentence; empty where it would not.
  virtual std::string ChangesLost(uint64_t since) const = 0;

  // Forgets the changes up to a version: those since an older one are not known any more. A number that is no
  // version of the table forgets nothing.
  virtual void ForgetChanges(uint64_t upto) = 0;

  // Upserts rows with their stamps, as an export gave them. freqs and versions may be null: zeros. A bounded
  // table takes `ranks` along; where they have no scores, rows start from their versions, as the seconds of their
  // last touch, and their freqs, as counts, in the epoch of the table.
  virtual void Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
                      const uint32_t* versions, const RanksIn& ranks, ParallelFor& threads) = 0;

  // ---- Bounded tables; see eviction.h

  virtual int64_t max_capacity() const = 0;  // 0: not bounded
  virtual Eviction eviction() const = 0;

  // Rows evicted so far to keep the capacity.
  virtual int64_t EvictedCount() const = 0;

  // The score of each key's row; 0 where it is missing, or the table is not bounded.
  virtual void Scores(const void* keys, int64_t n, uint64_t* scores, ParallelFor& threads) const = 0;

  // Sets the scores of the keys that are there, and returns how many these are (occurrences; the last of
  // equal keys wins). Throws Error(kFailedPrecondition) unless the table evicts by kCustom.
  virtual int64_t SetScores(const void* keys, int64_t n, const uint64_t* scores, ParallelFor& threads) = 0;

  // The epoch of the touches to come. Throws Error(kFailedPrecondition) unless the table evicts by epochs.
  virtual void SetEpoch(uint32_t epoch) = 0;
  virtual uint32_t epoch() const = 0;  // 0 where it does not

  // ---- Expiry; see expiry.h, which has Evict and Sweep on top of these

  virtual const Expiry& expiry() const = 0;

  // The time by which rows age: a step or a second. Where they do not age, the second that it is.
  virtual uint32_t Now() const = 0;

  // Of a table whose rows age by steps; otherwise throws Error(kFailedPrecondition). A step before that of
  // the table throws Error(kInvalidArgument).
  virtual void SetStep(uint32_t step) = 0;

  // Removes the rows that the test is true of, slots and all, among about `most_rows` places from the cursor
  // on, and moves that along. With kAllRows it shares the table out among the threads. Returns how many went.
  // The memory of rows that went is used for the next new ones.
  virtual int64_t EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                             ParallelFor& threads) = 0;

  // Adds the rows of a slice to `counts` (RankDigit::kValues), each where its digit says.
  virtual void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, int64_t* counts,
                          ParallelFor& threads) const = 0;

  // The places that a whole pass looks at: rows, and some that are empty.
  virtual int64_t PassLength() const = 0;

  // Rows that have gone by age, norm, frequency or rank.
  virtual int64_t ExpiredCount() const = 0;

  // Replaces the initial values of rows not yet there.
  virtual void SetInitializer(const Initializer& initializer) = 0;

  // ---- Admission; see admission.h

  // What admits keys to this table; null: nobody has to. The table leaves it to lookups to ask it
  // (Insertion::admitter). Set before the table is shared.
  const std::shared_ptr<Admitter>& admitter() const { return admitter_; }
  void set_admitter(std::shared_ptr<Admitter> admitter) { admitter_ = std::move(admitter); }

 private:
  std::shared_ptr<Admitter> admitter_;
};

}  // namespace kvtable
