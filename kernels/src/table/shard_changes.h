// What one version of a table changed in one shard.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "table/row_set.h"

namespace kvtable {

// How many more removed keys a table may remember. Shared by its shards.
struct RemovedRoom {
  std::atomic<int64_t> left{0};
};

// Changes from one cut to the next. Guarded by the shard's lock until the version is closed, and never changed
// from then on.
//
// A removed key is noted only where its row was there when the version began. So a key is noted once a version
// however often it comes and goes, and one that came and went in between not at all. Of several versions in a row, a
// key was there before the first one just if it was noted with a row that none of them, up to then, bore.
struct ShardChanges {
  RowSet changed;                      // rows that were written or born
  RowSet born;                         // rows that were born
  std::vector<uint64_t> removed;       // keys that went
  std::vector<uint32_t> removed_rows;  // and the rows that they had
  bool lost = false;                   // there was no room for a removed key
  RemovedRoom* room = nullptr;         // of the table; null: unlimited

  int64_t bytes() const {
    return changed.bytes() + born.bytes() +
           static_cast<int64_t>(removed.capacity() * sizeof(uint64_t) +
                                removed_rows.capacity() * sizeof(uint32_t));
  }

  void BeforeWrite(uint32_t row, bool is_new) {  // of a new row after PrepareBirth(row), and cannot fail then
    if (is_new) {
      changed.Add(row);
      born.Add(row);
    } else if (!changed.Has(row)) {
      changed.Prepare(row);
      changed.Add(row);
    }
  }
  void PrepareBirth(uint32_t row) {
    changed.Prepare(row);
    born.Prepare(row);
  }
  void BeforeRemove(uint32_t row, uint64_t key) {
    if (born.Has(row) || lost) return;
    if (room != nullptr && room->left.fetch_sub(1, std::memory_order_relaxed) <= 0) {
      room->left.fetch_add(1, std::memory_order_relaxed);
      lost = true;
      return;
    }
    removed.reserve(removed.size() + 1 > removed.capacity() ? 2 * removed.size() + 8 : 0);
    removed_rows.push_back(row);
    removed.push_back(key);
  }
};

}  // namespace kvtable
