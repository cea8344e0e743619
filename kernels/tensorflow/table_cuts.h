// Exports of one moment that wait to be written, and the marks that say since when a table's changes are asked for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kvtable/table.h"
#include "tensorflow/core/framework/tensor.h"

namespace kvtools {

// What a table was at one moment: all rows, or those that changed since another.
struct Cut {
  std::shared_ptr<kvtable::Table> table;
  kvtable::RowSchema schema;
  bool is_increment = false;
  uint32_t step = 0;   // of the table, just before
  uint32_t epoch = 0;  // then
  uint64_t draws = 0;  // of the resource, then
  std::vector<std::pair<std::string, tensorflow::Tensor>>
      more;                                     // tensors that go with it, as SavedTable::more
  std::unique_ptr<kvtable::Exporter> exporter;  // goes before the table
};

// The cuts of a variable that are neither saved nor dropped, by number. Any thread.
class TableCuts {
 public:
  int64_t Add(Cut cut) {
    const std::lock_guard<std::mutex> hold(mutex_);
    cuts_.emplace(++last_, std::move(cut));
    return last_;
  }
  // Whether there was one of this number, which is the caller's from now on.
  bool Take(int64_t number, Cut* cut) {
    const std::lock_guard<std::mutex> hold(mutex_);
    const auto at = cuts_.find(number);
    if (at == cuts_.end()) return false;
    *cut = std::move(at->second);
    cuts_.erase(at);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, Cut> cuts_;
  int64_t last_ = 0;
};

}  // namespace kvtools
