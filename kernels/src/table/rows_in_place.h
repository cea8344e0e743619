// Rows read where they lie: for lookups that combine rows, and need no copy of each.
#pragma once

#include <cstdint>
#include <functional>

#include "kvtable/table.h"

namespace kvtable {

// What a table offers whose rows lie in this process's memory.
class RowsInPlace {
 public:
  static constexpr int64_t kMostKeys = 512;  // of one call
  // rows[i] is where the value of key i lies, until the function returns. It must not use the table.
  using Read = std::function<void(const char* const* rows)>;

  // Calls read(rows) once, under the locks of the rows' shards, and is true; or is false, where rows cannot be read in
  // place now. A key that is missing gives what Table::Gather gives with `missing` (kZeros or kInitial), or, where there
  // is an `insertion`, what Table::GatherOrInsert does.
  virtual bool ReadInPlace(const void* keys, int64_t n, const Insertion* insertion, Missing missing,
                           const Read& read) = 0;

 protected:
  ~RowsInPlace() = default;
};

}  // namespace kvtable
