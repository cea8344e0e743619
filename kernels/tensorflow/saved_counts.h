// The counts of keys that wait to be admitted, in checkpoints: X-pending_keys and X-pending_counts, or
// X-pending_filter of docs/checkpoint-layout.md.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kvtable/table.h"
#include "saved_part.h"
#include "table_resource.h"

namespace kvtools {

// Adds the tensors of a table's counts as they are now, by what goes behind its prefix. Call it before the
// export of the rows is made: a key that is admitted meanwhile is better there twice than not at all. Takes 12
// bytes for each key that waits, or a copy of the filter.
void AddCounts(const TableConfig& config, const kvtable::Table& table,
               std::vector<std::pair<std::string, tensorflow::Tensor>>* more);

// Gives a table that has its rows the counts of a saved part: those of keys of part `own_part` of `own_parts`,
// and of keys without a row. What it has no use for is named in the log.
absl::Status ReadCounts(const TableConfig& config, const std::string& where, const SavedPart& part,
                        int64_t own_part, int64_t own_parts, tensorflow::BundleReader* reader,
                        kvtable::Table* table, kvtable::ParallelFor* threads);

}  // namespace kvtools
