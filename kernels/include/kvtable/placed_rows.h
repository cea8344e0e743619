// Pooled lookups of rows that are at hand: they lie in one buffer, or in pieces of one, of several dims, and the
// key of an id is the place of its row in it: the number of the element at which it begins.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/bags.h"
#include "kvtable/parallel_for.h"

namespace kvtable {

// All three throw Error(kInvalidArgument) where a place is not in the buffer. Bags are of places, int64; the
// buffer is of their value type, or, where that is float32, of a 16-bit one.

// A buffer, in pieces that lie anywhere. A row is in one piece.
struct PlacedRows {
  struct Piece {
    const void* data;
    int64_t elements;
  };
  ValueType type;
  std::vector<Piece> pieces;
};

struct PlacedPool {
  const Bags* bags;
  Combiner combiner;
  int64_t dim;
  void* pooled;  // (bags, dim)
};

// Sums are taken as PoolRows takes them.
void PoolPlaced(const std::vector<PlacedPool>& pools, const PlacedRows& rows, ParallelFor& threads);

struct PlacedWeightsGradient {
  const Bags* bags;  // with weights
  Combiner combiner;
  int64_t dim;
  const void* pooled;    // (bags, dim): what PoolPlaced gave
  const void* gradient;  // (bags, dim): with respect to these
  void* weights;         // (ids of the input): double for double, else float; zeros to begin with
};

void FindPlacedWeightsGradient(const std::vector<PlacedWeightsGradient>& pools, const PlacedRows& rows,
                               ParallelFor& threads);

struct PlacedGradient {
  const Bags* bags;
  Combiner combiner;
  int64_t dim;
  const void* gradient;  // (bags, dim) with respect to what was pooled
};

// The gradient with respect to the buffer; zeros where no id has its row. A row's sum is taken in the order
// of its ids, in float for 16-bit values, whatever the number of threads, and rounded once.
void SumPlaced(const std::vector<PlacedGradient>& gradients, ValueType type, void* rows, int64_t elements,
               ParallelFor& threads);

}  // namespace kvtable
