// Rows of saved parts into a table: read, checked and imported by several threads, a chunk at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvtable/table.h"
#include "saved_part.h"
#include "saved_rows.h"
#include "table_resource.h"

namespace kvtools {

class RowsIn {
 public:
  // `slots`: those of the saved rows; the table has them. `where` is the checkpoint, for messages.
  RowsIn(const TableConfig& config, std::string where, std::vector<kvtable::SlotSpec> slots,
         kvtable::Table* table)
      : config_(config), where_(std::move(where)), slots_(std::move(slots)), table_(table) {}

  // Which keys are read: those of this part of so many. `all_own`: the parts that are read have no others.
  int64_t own_part = 0;
  int64_t own_parts = 1;
  bool all_own = false;

  // A part to read. Both must outlive Read.
  void Add(const SavedPart& part, DataFiles* files);

  // Reads all parts. Takes kReadBytes of memory at most, for any size of rows that are not themselves larger.
  absl::Status Read(kvtable::ParallelFor* threads);

  // Whether a row that was read has the table's padding_key: it went.
  bool has_padding() const { return has_padding_; }

  static constexpr int64_t kReadBytes = int64_t{128} << 20;

 private:
  struct Part;
  struct Chunk {
    Part* part;
    int64_t start;
    int64_t rows;
  };
  class Turns;

  int64_t RowBytes(const Part& part) const;
  absl::Status ReadChunk(const Chunk& chunk, char* buffer, int64_t number, Turns* turns,
                         kvtable::ParallelFor* threads);
  // The rows of a chunk that are our own, by their places in it.
  template <class Key>
  void FindOwn(const void* keys, int64_t rows, std::vector<int64_t>* own) const;

  const TableConfig& config_;
  const std::string where_;
  const std::vector<kvtable::SlotSpec> slots_;
  kvtable::Table* const table_;
  std::vector<std::shared_ptr<Part>> parts_;
  std::atomic<bool> has_padding_{false};
};

}  // namespace kvtools
