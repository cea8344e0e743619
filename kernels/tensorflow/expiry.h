// Rows that go: beside training, before saves, and what a table's own policies are.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/expiry.h"
#include "kvtable/table.h"
#include "table_resource.h"

namespace kvtools {

// Whether the versions of a table are steps.
inline bool CountsSteps(const kvtable::Table& table) {
  return table.expiry().ages() && table.expiry().unit == kvtable::AgeUnit::kSteps;
}

// Removes the rows that no lookup gives any more, so that no file has them; with expire_on_save, those of the
// other policies, too.
void ExpireBeforeSave(const TableConfig& config, kvtable::Table* table, kvtable::ParallelFor& threads);

}  // namespace kvtools
