// Who is told before a row of a shard changes: the log of changes, and exports of one moment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "table/row_store.h"
#include "table/shard_changes.h"
#include "table/shard_moment.h"

namespace kvtable {

// Guarded by the shard's lock. A shard has one only while there is a log or an export to tell.
//
// Who writes a row calls BeforeWrite before the first byte of it, its stamp or its score changes; who removes
// one calls BeforeRemove while the row is still there. Both may throw (std::bad_alloc), and then nothing has
// changed: but for a new row, which is told of in advance by PrepareBirth.
struct RowWatch {
  std::shared_ptr<ShardChanges> log;  // of the version that is open; null: changes are not tracked
  std::vector<ShardMoment*> moments;

  bool idle() const { return log == nullptr && moments.empty(); }

  void PrepareBirth(uint32_t row) {
    if (log != nullptr) log->PrepareBirth(row);
  }
  void BeforeWrite(const RowStore& rows, uint32_t row, bool is_new) {
    for (ShardMoment* moment : moments) moment->Before(rows, row, is_new);
    if (log != nullptr) log->BeforeWrite(row, is_new);
  }
  void BeforeRemove(const RowStore& rows, uint32_t row) {
    for (ShardMoment* moment : moments) moment->Before(rows, row, false);
    if (log != nullptr) log->BeforeRemove(row, rows.StampOf(row)->key);
  }
};

}  // namespace kvtable
