// A table with a capacity, made of one without.
#pragma once

#include <memory>

#include "kvtable/eviction.h"
#include "kvtable/table.h"
#include "table/sharded_table.h"

namespace kvtable {

// `table` has no rows yet. Without a clock it is the system's.
std::unique_ptr<Table> BoundTable(std::unique_ptr<ShardedTable> table, int64_t max_capacity,
                                  Eviction eviction, const EvictionClock& clock);

}  // namespace kvtable
