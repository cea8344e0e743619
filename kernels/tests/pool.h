// The threads that tests lend to tables.
#pragma once

#include <memory>

#include "kvtable/parallel_for.h"

namespace kvtable {

inline ParallelFor& Pool() {
  static const std::unique_ptr<ParallelFor> pool = MakeThreadPool(3);
  return *pool;
}

}  // namespace kvtable
