// One shard of a table: its lock, index, rows and row layout.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/hash.h"
#include "table/index.h"
#include "table/row_layout.h"
#include "table/row_store.h"
#include "table/row_watch.h"
#include "table/shard_lock.h"
#include "table/zero_marks.h"

namespace kvtable {

// Everything but `size` is guarded by `lock`.
struct alignas(64) Shard {
  // `slots` are for the index, `pages` for the rows. With `cache`, these are where that has them.
  Shard(ReadSeats* seats, int number, std::shared_ptr<const RowLayout> row_layout, bool huge_pages,
        std::shared_ptr<EqualSlots> slots, std::shared_ptr<SharedPages> pages,
        std::unique_ptr<RowCache> cache = nullptr)
      : lock(seats, number),
        index(std::move(slots), number),
        rows(row_layout->row_bytes, huge_pages, std::move(pages), std::move(cache)),
        layout(std::move(row_layout)) {}

  mutable ShardLock lock;
  std::atomic<int64_t> size{0};  // live rows; written under the lock, read without
  alignas(64) BucketIndex index;
  RowStore rows;
  std::shared_ptr<const RowLayout> layout;
  ZeroMarks zeroed;
  std::unique_ptr<RowWatch> watch;  // null: nobody is to be told of changes

  // Every change of a row passes one of these two: BeforeWrite before its bytes, stamp or score change (`is_new`:
  // FindOrInsert has just made it), BeforeRemove while it is still there. They may throw std::bad_alloc, but
  // for a new row; then nothing has changed yet.
  void BeforeWrite(uint32_t row, bool is_new) {
    if (__builtin_expect(watch != nullptr, 0)) watch->BeforeWrite(rows, row, is_new);
    if (__builtin_expect(rows.cache() != nullptr, 0)) rows.cache()->BeforeWrite(row);
    zeroed.Unmark(row);
  }
  // The same where the contents of the row stay, and with them what is known of its zeros.
  void BeforeStamp(uint32_t row) {
    if (__builtin_expect(watch != nullptr, 0)) watch->BeforeWrite(rows, row, false);
  }
  void BeforeRemove(uint32_t row) {
    if (__builtin_expect(watch != nullptr, 0)) watch->BeforeRemove(rows, row);
    zeroed.Unmark(row);
  }

  // The row of a key, made where there is none: then `*is_new` is set, the stamp holds the key and zeros, and
  // the row's bytes are the caller's to write before it lets go of the lock. Throws
  // Error(kResourceExhausted), and changes nothing then.
  uint32_t FindOrInsert(uint64_t key, uint64_t hash, bool* is_new) {
    uint32_t row = index.Find(hash);
    *is_new = row == BucketIndex::kNoRow;
    if (!*is_new) return row;
    rows.PrepareAllocate();
    index.PrepareInsert(rows.next_row());
    if (watch != nullptr) watch->PrepareBirth(rows.next_row());
    row = rows.Allocate();
    index.Insert(hash, row);
    *rows.StampOf(row) = {key, 0, 0};
    size.store(rows.live_rows(), std::memory_order_relaxed);
    return row;
  }

  bool Remove(uint64_t hash) {  // needs rows.PrepareFree
    if (__builtin_expect(watch != nullptr, 0)) {
      const uint32_t there = index.Find(hash);
      if (there != BucketIndex::kNoRow) watch->BeforeRemove(rows, there);
    }
    const uint32_t row = index.Erase(hash);
    if (row == BucketIndex::kNoRow) return false;
    zeroed.Unmark(row);
    rows.Free(row);
    size.store(rows.live_rows(), std::memory_order_relaxed);
    return true;
  }

  void Clear() {
    index.Clear();
    rows.Clear();
    zeroed.Clear();
    size.store(0, std::memory_order_relaxed);
  }
};

}  // namespace kvtable
