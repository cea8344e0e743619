// Writes a snapshot: for each table the keys of all rows first, then the rows themselves, in any order.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/quantized_rows.h"
#include "kvtable/types.h"
#include "memory/huge_pages.h"
#include "snapshot/format.h"
#include "snapshot/key_sorter.h"

namespace kvtable {

// What a table is. Where `form` is another than kPlain, rows come as float32 and are kept in it.
struct SnapshotTablePlan {
  std::string name;
  KeyType key_type = KeyType::kInt64;
  ValueType value_type = ValueType::kFloat32;
  RowForm form = RowForm::kPlain;
  int64_t dim = 0;
  int64_t rows = 0;  // that come
  uint8_t frequency_type = 0;
  uint8_t version_type = 0;
};

// Bytes that are appended, with a checksum of each mebibyte.
class SectionOutput {
 public:
  SectionOutput(int file, int64_t offset) : file_(file), offset_(offset) {}

  void Append(const void* data, int64_t bytes);
  int64_t bytes() const { return bytes_; }
  // The checksums of all pieces; ends the section.
  std::vector<uint32_t> Finish();

 private:
  int file_;
  int64_t offset_;
  int64_t bytes_ = 0;
  int64_t in_piece_ = 0;
  uint32_t crc_ = 0;
  std::vector<uint32_t> checksums_;
};

// A table that is begun takes AddKeys for all its rows, SortKeys once, AddRows for all its rows, EndTable. What
// the system refuses is a std::system_error; a misuse an Error(kInvalidArgument). A key takes 16 bytes of memory
// until its table's keys are sorted, and 4 or 8 from then on; rows take `memory` bytes at most. More than that
// go through the disk: each to the run of places where it belongs, and then, one run after the other, to its own.
class SnapshotWriter {
 public:
  // Creates the file `path`, which must not be there.
  SnapshotWriter(const std::string& path, int64_t memory);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  void BeginTable(const SnapshotTablePlan& plan);
  // The keys of the next `n` rows, as 64-bit patterns.
  void AddKeys(const int64_t* keys, int64_t n);
  // Writes the keys. Returns how many rows are hidden by a later one of the same key.
  int64_t SortKeys(ParallelFor& threads);
  // Rows [first, first + n) in the order of their keys: `values` (n, dim), `frequencies` and `versions` (n), null
  // where the table has none. May be called by several threads at once.
  void AddRows(int64_t first, int64_t n, const void* values, const void* frequencies, const void* versions);
  // The row of missing keys: (dim) of the table's value type.
  void SetDefaultRow(const void* row);
  void EndTable();

  // Writes a whole table: that of another snapshot with what lies over it, but no frequencies and versions. Both are
  // in order, so all is written as it comes, and takes no memory but that of the levels merged. The work is done on
  // `threads`, a piece at a time; `go_on` is called after each with the rows that are done and all. Returns whether it
  // came to its end; the file is of no use otherwise. Throws what Snapshot::Verify does, where the other file is not
  // known to be sound yet.
  bool CopyTable(const SnapshotTable& table, ParallelFor& threads, const Snapshot::GoOn& go_on);

  // Ends and syncs the file, with `json` as its description.
  void Close(const std::string& json);

 private:
  // A column of rows, and its place in the file.
  struct Column {
    SnapshotTable::Section section;
    int64_t width;   // bytes
    int64_t offset;  // of the section
  };
  // Rows on their way to a run of places.
  struct Waiting {
    std::vector<uint32_t> places;  // in the run, of all rows that came
    std::vector<uint8_t> rows[3];  // of each column: those that are not written yet
    int64_t written = 0;
  };

  int64_t Allocate(int64_t bytes);
  void Note(SnapshotTable::Section section, int64_t offset, SectionOutput& output);
  void PlanRuns();
  void StoreRow(const uint8_t* from, uint8_t* to) const;
  void WriteWaiting(int64_t run);
  void WriteRows();

  std::string path_;
  int file_ = -1;
  int64_t memory_;
  int64_t end_ = snapshot_format::kAlignment;
  std::vector<std::string> names_;
  std::vector<snapshot_format::TableRecord> records_;
  std::vector<uint32_t> checksums_;

  // The table that was begun.
  SnapshotTablePlan plan_;
  RowEncode encode_ = nullptr;  // where its rows are quantized
  std::vector<uint32_t> section_checksums_[SnapshotTable::kSections];
  Region entries_;  // MixedKey (plan_.rows), until they are sorted
  int64_t keys_added_ = 0;
  Region places_;     // uint32 (plan_.rows): where each row goes
  int64_t rows_ = 0;  // without those that are hidden
  std::vector<Column> columns_;
  int64_t run_rows_ = 0;  // places that are filled in memory at once
  Region runs_[3];        // of each column: all rows, where they are one run
  std::vector<Waiting> waiting_;
  int64_t wait_rows_ = 0;  // of a run, before they are written
  std::mutex mutex_;       // of waiting_
  std::atomic<int64_t> rows_added_{0};
};

}  // namespace kvtable
