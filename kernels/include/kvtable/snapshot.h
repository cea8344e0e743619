// A snapshot: the tables of a model in one immutable file, mapped and looked up as it is.
//
// docs/dialects/snapshot.md is the file, byte by byte. Opening reads the header and the description: a table of
// any size is there at once, and several processes share its memory. Everything here may be called from any
// number of threads.
//
// A file that is replaced by a rename, or deleted, stays as it is for who has it open. One that is cut or
// written over in place does not: lookups then throw Error(kFailedPrecondition) from that moment on, and never
// return rows of two files. Nothing else ends the process: the pages that are gone read as zeros, by a
// handler of SIGBUS that looks at addresses of snapshots only, and what was read of them is thrown away.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvtable/bags.h"
#include "kvtable/parallel_for.h"
#include "kvtable/quantized_rows.h"
#include "kvtable/types.h"

namespace kvtable {

class SnapshotFile;
class SnapshotLevel;

// One table. Keys are passed as 64-bit patterns: int32 sign-extended, uint64 as its bits. Every value is a
// legal key.
class SnapshotTable {
 public:
  // The sections of a table in the file.
  enum Section { kDirectory, kKeys, kRows, kFrequencies, kVersions, kDefaultRow, kSections };
  struct Range {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;   // 0: the table has no such section
  };
  struct Layout {
    std::string name;
    KeyType key_type = KeyType::kInt64;
    ValueType value_type = ValueType::kFloat32;
    RowForm form = RowForm::kPlain;  // any other is of float32
    int64_t dim = 0;
    int64_t rows = 0;
    int64_t row_bytes = 0;
    int64_t buckets = 1;
    bool wide_directory = false;
    uint8_t frequency_type = 0;  // as in the file; 0: none
    uint8_t version_type = 0;
    int64_t duplicates = 0;  // rows of the source that a later one of the same key hides
    Range sections[kSections];
    int64_t first_checksum[kSections] = {};  // of each section, among those of the file
  };

  SnapshotTable(const SnapshotFile* file, Layout layout);

  const std::string& name() const { return layout_.name; }
  KeyType key_type() const { return layout_.key_type; }
  // Of what LookupRaw gives. Rows of another form than kPlain (`quantized`) are float32 there.
  ValueType value_type() const { return layout_.value_type; }
  bool quantized() const { return layout_.form != RowForm::kPlain; }
  int dim() const { return static_cast<int>(layout_.dim); }
  int64_t rows() const { return levels_.empty() ? layout_.rows : live_rows_; }
  // Of one row that LookupRaw gives.
  int64_t value_bytes() const { return layout_.dim * SizeOf(layout_.value_type); }
  const Layout& layout() const { return layout_; }

  // The table's own row for missing keys (value_bytes()), or null where it has none.
  const void* default_row() const;

  // This table under `levels`, the newest first: what one of them says of a key counts, and not what an older one or
  // the file says. `rows` is how many rows there are then. Frequencies and versions are left out. The file of this
  // table must outlive the result. Levels of this table are replaced, not added to.
  //
  // Throws Error(kInvalidArgument) where the levels are of another type.
  SnapshotTable Overlaid(std::vector<std::shared_ptr<const SnapshotLevel>> levels, int64_t rows) const;
  const std::vector<std::shared_ptr<const SnapshotLevel>>& levels() const { return levels_; }
  // Of memory, that the levels take.
  int64_t level_bytes() const;

  // How many row numbers there are: those of the file and those of each level, in which some are of rows that are gone
  // or have been replaced. Find gives those of the others.
  int64_t positions() const;

  // The keys of the file as they lie in it, mixed and rising, and its rows in their order. For who merges tables.
  const uint64_t* mixed_keys() const { return keys_; }
  const uint8_t* stored_rows() const { return rows_; }
  // Of the file: rises when it turns out to have been written to. CheckStill throws Error(kFailedPrecondition) where it is
  // not this one any more: what was read of the three above since may be of other bytes.
  uint32_t generation() const;
  void CheckStill(uint32_t generation) const;

  // The row number of each of `n` keys, -1 where there is none.
  void Find(const int64_t* keys, int64_t n, int64_t* rows) const;

  // The rows of `n` keys as float32 `out` (n, dim), whatever the table's type; an absent key gets `missing`
  // (dim), zeros if that is null. `found` (n), which may be null, becomes 1 or 0. Returns how many are absent.
  int64_t Lookup(const int64_t* keys, int64_t n, float* out, uint8_t* found = nullptr,
                 const float* missing = nullptr) const;

  // The same in the table's own type: `out` (n, dim) and `missing` (dim) of value_type().
  int64_t LookupRaw(const int64_t* keys, int64_t n, void* out, uint8_t* found = nullptr,
                    const void* missing = nullptr) const;

  // Combines the rows of each bag into one of `out` (bags, dim): bag b has the keys [splits[b], splits[b + 1]).
  // A missing key counts like others, with the row `missing` (zeros if null). `weights` has one for each key,
  // or is null: all are 1. Where the divisor is 0, and for a bag without keys, the row is zeros. Sums are made
  // in float, key after key (in double for float64). Returns how many keys are absent.
  //
  // Throws Error(kInvalidArgument) on splits that do not rise from 0.
  int64_t Pool(const int64_t* keys, const int64_t* splits, int64_t bags, Combiner combiner,
               const float* weights, float* out, const float* missing = nullptr) const;

  // Copies of the columns of rows [first, first + n), or of the rows numbered `rows` (n). `keys` are 64-bit
  // patterns; `bytes` is that of the column: SizeOf its type.
  void ReadKeys(int64_t first, int64_t n, int64_t* keys) const;
  void TakeKeys(const int64_t* rows, int64_t n, int64_t* keys) const;
  void ReadRows(int64_t first, int64_t n, void* out) const;
  void TakeRows(const int64_t* rows, int64_t n, void* out) const;
  void ReadColumn(Section section, int64_t bytes, int64_t first, int64_t n, void* out) const;
  void TakeColumn(Section section, int64_t bytes, const int64_t* rows, int64_t n, void* out) const;

  // Compares the mebibytes of a section that begin in bytes [begin, end) of it with their checksums. Throws
  // Error(kInvalidArgument) naming table, section and place of the first that differs.
  void Verify(Section section, int64_t begin, int64_t end) const;

  // See Snapshot::VerifyOnUse.
  bool verifies_on_use() const;

 private:
  friend class Snapshot;

  void ReadDefaultRow();
  // Whether the mebibyte of a section that begins at `place` is what was written, and keys in it are in order.
  bool Holds(Section section, int64_t place) const;
  // Whether the mixed keys [first, first + n) rise, from the one before them on, and lie in the buckets that
  // the directory says.
  bool KeysRise(int64_t first, int64_t n, const uint64_t* mixed) const;

  // What VerifyOnUse promises: verifies the mebibytes in which `bytes` of a section from `begin` on lie, those
  // of them that are not known to be sound yet.
  void VerifyUsed(Section section, int64_t begin, int64_t bytes) const;
  void VerifyDirectoryOf(int64_t piece) const;
  // The same for elements of `width` bytes: [first, first + n) of them, or those numbered `rows` (n).
  void VerifyRange(Section section, int64_t width, int64_t first, int64_t n) const;
  void VerifyTaken(Section section, int64_t width, const int64_t* rows, int64_t n) const;
  // The same for all that finding a group of keys reads.
  template <class Entry>
  void VerifyGroup(const int64_t* keys, int n, bool ask) const;
  // Lets the disk begin with a mebibyte that VerifyUsed will read.
  void AskForUsed(Section section, int64_t place) const;

  template <class Use>
  void ForFound(const int64_t* keys, int64_t n, bool rows_too, const Use& use) const;
  template <class Use>
  void ForRows(const int64_t* keys, int64_t n, const Use& use) const;
  int FindInLevels(const int64_t* keys, int count, const uint8_t** rows, int64_t* left, int* at) const;
  struct Place {
    uint64_t mixed;
    const uint8_t* row;  // null: it is gone
  };
  Place PlaceOf(int64_t number) const;
  static std::vector<int64_t> Numbers(int64_t first, int64_t n);

  const SnapshotFile* file_;
  Layout layout_;
  std::vector<uint8_t> default_row_;  // a copy, so that it is what was compared with its checksum
  const void* directory_;
  const uint64_t* keys_;
  const uint8_t* rows_;
  std::vector<std::shared_ptr<const SnapshotLevel>> levels_;  // the newest first
  int64_t live_rows_ = 0;                                     // with levels
};

class Snapshot {
 public:
  // Throws Error: kFailedPrecondition where the file cannot be opened, kInvalidArgument where it is no
  // snapshot, of a later version, truncated or damaged (as far as header and description tell).
  static std::shared_ptr<Snapshot> Open(const std::string& path);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  const std::string& path() const;
  int64_t bytes() const;
  // Tells the file that is mapped from every other of this machine, and from itself before it was last written to or
  // touched, as far as CheckUnchanged, a lookup or a read has seen that.
  std::string identity() const;
  // Whether the file that is mapped lies at `path`.
  bool IsAt(const std::string& path) const;
  // Says what the file is, in 32 hexadecimal digits: two files with one fingerprint have the same rows.
  const std::string& fingerprint() const;
  // What else the writer recorded: a JSON object in UTF-8.
  const std::string& description() const;

  const std::vector<SnapshotTable>& tables() const;
  // Null where there is none of this name.
  const SnapshotTable* table(std::string_view name) const;

  // Called now and then, with the bytes that are done and those there are; false stops.
  using GoOn = std::function<bool(int64_t done, int64_t total)>;

  // Reads the file into memory, directories and keys first, then rows. Returns whether it came to the end. What is beyond the memory there is pushes out what was read first: rows, at the
  // latest, are read as they are asked for.
  bool Populate(ParallelFor& threads, const GoOn& go_on = {});
  // Whether Populate came to its end.
  bool warm() const;
  // Whether it read all rows, too: there was memory for them.
  bool resident() const;

  // Reads all and compares it with the file's checksums. Returns whether it came to the end: with `go_on`, it does not
  // where the file was written to meanwhile, and without it begins anew. Throws Error(kInvalidArgument) naming table,
  // section and place of the first mebibyte that differs.
  bool Verify(ParallelFor& threads, const GoOn& go_on = {}) const;

  // From now on no lookup or read gives bytes of a mebibyte before that was compared with its checksum: the first
  // one to touch it does so, and throws what Verify does where it is damaged. Default rows are compared at once.
  // It ends, and costs nothing any more, when Verify has come to its end. What a lookup has found damaged, a
  // Verify that is running throws, too, at its next call of `go_on`. It begins by itself where the file turns out to
  // have been written to, touched or given other attributes since it was opened.
  void VerifyOnUse();
  // Ends that without Verify: another process has verified the file of this `identity`. Returns whether this is one.
  bool Trust(const std::string& identity);
  bool verifies_on_use() const;

  // Throws Error(kFailedPrecondition) where the file was cut or has become another snapshot since it was opened: it gives
  // no rows any more.
  void Look() const;
  // The same, and where it was written to or touched within the last 50 ms. Each lookup and read does so when it is
  // done, and is made again, with VerifyOnUse, where the file may have been written to meanwhile.
  void CheckUnchanged() const;

 private:
  explicit Snapshot(std::unique_ptr<SnapshotFile> file);

  std::unique_ptr<SnapshotFile> file_;
  std::vector<SnapshotTable> tables_;
  std::string fingerprint_;
};

}  // namespace kvtable
