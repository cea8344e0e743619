// Pooled lookups: rows are combined as they are found, a few hundred at a time, and never all written down.
#pragma once

#include <vector>

#include "kvtable/bags.h"
#include "kvtable/lookup_parts.h"

namespace kvtable {

struct PooledLookup {
  TableParts parts;
  const Bags* bags;
  Combiner combiner;
  void* rows;  // (bags, dim) of the tables' value type
  MissingKeys missing;
};

// Sums are taken in float for 16-bit values, id after id within a bag, whatever the number of threads.
void PoolRows(const std::vector<PooledLookup>& lookups, ParallelFor& threads);

struct PooledWeightsGradient {
  TableParts parts;
  const Bags* bags;  // with weights
  Combiner combiner;
  const void* rows;      // (bags, dim): what PoolRows gave
  const void* gradient;  // (bags, dim): with respect to these
  void* weights;         // (ids of the input): double for tables of double, else float; zeros to begin with
  MissingKeys missing;   // `insert` is ignored
};

// The gradient with respect to the weights, from rows looked up again.
void PoolWeightsGradient(const std::vector<PooledWeightsGradient>& lookups, ParallelFor& threads);

}  // namespace kvtable
