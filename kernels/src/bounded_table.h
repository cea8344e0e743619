// A table with a capacity, made of one without.
#pragma once

#include <memory>

#include "kvtable/eviction.h"
#include "kvtable/table.h"

namespace kvtable {

// `table` has no rows yet.
std::unique_ptr<Table> BoundTable(std::unique_ptr<Table> table, int64_t max_capacity, Eviction eviction);

}  // namespace kvtable
