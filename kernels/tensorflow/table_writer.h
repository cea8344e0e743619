// Writes tables into a bundle, in the layout of docs/checkpoint-layout.md: a chunk of rows at a time, by several
// threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvtable/table.h"
#include "save_threads.h"
#include "table_resource.h"

namespace kvtools {

struct SavedCounts {
  int64_t rows = 0;
  // Of an increment: the keys that went, and how many of the rows were born since.
  int64_t removed = 0;
  int64_t born = 0;
};

// What is saved of a table: the rows that an exporter gives, under these names.
struct SavedTable {
  TableConfig config;
  std::string prefix;  // of its tensors
  std::string name;    // of the variable
  int64_t part = 0;
  int64_t parts = 1;
  std::shared_ptr<kvtable::Table> table;
  kvtable::RowSchema schema;  // of the rows that the exporter gives
  std::unique_ptr<kvtable::Exporter> exporter;
  // Whether several threads may take rows from it at once, as of an export of one moment.
  bool concurrent = false;
  bool is_increment = false;      // the exporter gives what changed
  uint32_t step = 0;              // of the table, before the export began; where it counts steps
  uint32_t epoch = 0;             // of the table, then; where it evicts by epochs
  uint64_t draws = 0;             // of the resource, then
  SavedCounts* counts = nullptr;  // filled in; may be null
  std::string more_meta;          // behind the other members of kvmeta: `, "name": value`
  std::vector<std::pair<std::string, tensorflow::Tensor>> more;  // tensors, by what goes behind the prefix
};

// Writes the bundle `prefix`, whose folder is there, with `threads` threads of its own at most. `lent` are the
// kernel's, with the stream of tables on a GPU. Takes kWriteBytes of memory at most beside the tables, for rows that
// are not themselves larger.
absl::Status WriteTables(tensorflow::Env* env, const std::string& prefix, std::vector<SavedTable> tables,
                         int threads, SavePriority priority, kvtable::ParallelFor* lent);

inline constexpr int64_t kWriteBytes = int64_t{128} << 20;

}  // namespace kvtools
