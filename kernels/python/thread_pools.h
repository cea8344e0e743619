// The threads of tables that are called from Python.
#pragma once

#include <memory>

#include "kvtable/parallel_for.h"

namespace kvtable {

// One pool for each number of threads, shared by the tables that ask for it: a process may have hundreds of
// tables. 0: one thread per CPU.
std::shared_ptr<ParallelFor> PoolOf(int threads);

}  // namespace kvtable
