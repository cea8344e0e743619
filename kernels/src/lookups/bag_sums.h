// Pooling of rows that come bag after bag, some at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/bags.h"
#include "training/add_rows.h"

namespace kvtable {

class BagSums {
 public:
  // Of bags [first, last), into `pooled` (bags, dim) of the bags' value type, which is that of the rows, too, or
  // float32 where they are of 16 bits.
  BagSums(const Bags& bags, ValueType rows, Combiner combiner, int64_t dim, int64_t first, int64_t last,
          void* pooled);

  // The rows of the next n ids, wherever they lie: they are asked for before they are read.
  void Add(const char* const* rows, int64_t n);
  // When all ids have come: bags without ids may be left.
  void Finish();

 private:
  template <class T>
  void AddTyped(const char* const* rows, int64_t n);

  const Bags& bags_;
  const ValueType rows_;
  const Combiner combiner_;
  const int64_t dim_;
  const int64_t last_;
  char* const pooled_;
  const AddRows add_;
  int64_t bag_;  // the one whose turn it is
  int64_t id_;   // that comes next
  std::vector<double> sum_;
};

}  // namespace kvtable
