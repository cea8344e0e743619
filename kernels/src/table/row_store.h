// The rows of one shard and the columns beside them. A row, once handed out, never moves, but where it is in a cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/huge_pages.h"
#include "spill/row_cache.h"
#include "table/reused_rows.h"
#include "table/row_pieces.h"

namespace kvtable {

// What is kept beside each row.
struct RowStamp {
  uint64_t key;
  uint32_t frequency;
  uint32_t version;
};

// Stamps and liveness bits lie in slabs whose sizes double: slab k holds `base << k` rows. A row number leads to its slab by
// counting leading zeros, so there is no table of slabs to chase, and a slab's memory is touched only as its rows are handed
// out. Rows lie in pieces of their own (row_pieces.h).
class RowStore {
 public:
  static constexpr int kMinBaseBits = 6;                   // whole words of the liveness bitmap
  static constexpr uint32_t kMaxRows = uint32_t{3} << 30;  // row + first slab's rows must fit in 32 bits

  // `pages` are for the rows. With `cache`, these are where that has them.
  RowStore(int64_t row_bytes, bool huge_pages, std::shared_ptr<SharedPages> pages,
           std::unique_ptr<RowCache> cache = nullptr)
      : cache_(std::move(cache)), rows_(row_bytes, std::move(pages)), huge_pages_(huge_pages) {}
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // The bytes of a row; of a store with a cache, of one that is in memory.
  char* Row(uint32_t row) const {
    if (__builtin_expect(cache_ != nullptr, 0)) return cache_->Row(row);
    return rows_.Row(row);
  }
  // What a lookup goes on with: the address of a row; of a store with a cache, kByNumber and its number, by which the
  // cache, which is asked to be near, tells where it is.
  static constexpr uintptr_t kByNumber = uintptr_t{1} << 62;  // no address of a process has it
  uintptr_t Find(uint32_t row) const {
    if (__builtin_expect(cache_ == nullptr, 1)) return reinterpret_cast<uintptr_t>(Row(row));
    cache_->Prefetch(row);
    return kByNumber | row;
  }
  // Ask for what leads to the bytes of a row that is in memory, and for what is beside them, of a store with a cache: the
  // first of a row that Row is asked for soon, the second of one for which that is near.
  void PrefetchPlace(uint32_t row) const {
    if (__builtin_expect(cache_ != nullptr, 0)) cache_->Prefetch(row);
  }
  void PrefetchFrame(uint32_t row) const {
    if (__builtin_expect(cache_ != nullptr, 0)) cache_->PrefetchFrame(row);
  }
  // What keeps rows in a file; null: all rows are in memory.
  RowCache* cache() const { return cache_.get(); }
  RowStamp* StampOf(uint32_t row) const {
    return reinterpret_cast<RowStamp*>(stamps_of_slab_[SlabBits(row)] + row * uintptr_t{sizeof(RowStamp)});
  }
  bool IsLive(uint32_t row) const { return (*LiveWord(row) >> (row % 64) & 1) != 0; }

  // Makes sure that the next Allocate cannot fail. Throws Error(kResourceExhausted).
  void PrepareAllocate();
  // A row to be written: live, its contents undefined. Needs PrepareAllocate() first.
  uint32_t Allocate() noexcept;
  // Makes sure that the next `rows` calls of Free cannot fail. Throws std::bad_alloc.
  void PrepareFree(size_t rows) {
    // By half again at least, so that each entry of the list is copied but a few times.
    const size_t needed = free_.size() + rows;
    if (needed > free_.capacity()) free_.reserve(std::max(needed, free_.capacity() + free_.capacity() / 2));
  }
  void Free(uint32_t row) noexcept;
  void Clear();
  // Has Allocate add the rows it hands out to `rows`, until Unwatch.
  void Watch(ReusedRows* rows) { watching_.push_back(rows); }
  void Unwatch(const ReusedRows* rows) noexcept {
    watching_.erase(std::find(watching_.begin(), watching_.end(), rows));
  }
  // Sizes the first slab for `rows`, where no row has been handed out yet.
  void Reserve(size_t rows);

  // Rows get a new size in two steps, so that many stores change together or not at all. PrepareRelayout takes
  // all memory, also for rows that come before the second step (address space: it is touched as it is
  // written); it throws Error(kResourceExhausted) or std::bad_alloc, and nothing has changed then. One of the
  // others follows it.
  // `convert` makes rows of the old size ones of the new size; `pages` are for these.
  void PrepareRelayout(int64_t row_bytes, const ConvertRows& convert, std::shared_ptr<SharedPages> pages);
  void Relayout(const ConvertRows& convert) noexcept;
  void CancelRelayout() noexcept {
    if (cache_ != nullptr) cache_->CancelRelayout();
    next_rows_.reset();
  }

  int64_t row_bytes() const { return cache_ == nullptr ? rows_.row_bytes() : cache_->row_bytes(); }
  // Row numbers handed out so far, removed ones included: [0, high_water).
  uint32_t high_water() const { return high_water_; }
  // The row that Allocate would give.
  uint32_t next_row() const { return free_.empty() ? high_water_ : free_.back(); }
  uint32_t live_rows() const { return high_water_ - static_cast<uint32_t>(free_.size()); }

  // Calls visit(row) for the live rows of [begin, end), in order, until it returns false. Returns the first
  // row number not visited.
  template <class Visit>
  uint32_t ForEachLive(uint32_t begin, uint32_t end, const Visit& visit) const {
    for (uint32_t row = begin; row < end;) {
      const uint64_t word = *LiveWord(row) >> (row % 64);
      if (word == 0) {
        row = row / 64 * 64 + 64;
        continue;
      }
      row += static_cast<uint32_t>(__builtin_ctzll(word));
      if (row >= end) break;
      if (!visit(row)) return row;
      ++row;
    }
    return end;
  }

  int64_t TouchedRowBytes() const;
  // Rows in the file.
  int64_t spilled_rows() const { return cache_ == nullptr ? 0 : live_rows() - cache_->here(); }
  // Of stamps, liveness and the list of free rows.
  int64_t TouchedColumnBytes() const;

 private:
  struct Slab {
    Region stamps;
    Region live;
  };
  // Addresses from which row * size leads to the element: the slab's memory less what earlier slabs hold.
  // Numbers, because no pointer may lie outside its array. Those of slab k are at base_bits_ + k: the highest bit of
  // the sum of a row's number and first_slab_rows_. Most rows are in the last two slabs, so that lookups read one line.
  using SlabBases = std::array<uintptr_t, 32>;

  size_t SlabBits(uint32_t row) const {
    return 31 - static_cast<size_t>(__builtin_clz(row + first_slab_rows_));
  }
  uint64_t* LiveWord(uint32_t row) const {
    return reinterpret_cast<uint64_t*>(live_of_slab_[SlabBits(row)] + row / 64 * sizeof(uint64_t));
  }
  size_t SlabRows(int slab) const { return size_t{1} << (base_bits_ + slab); }
  size_t SlabBegin(int slab) const { return SlabRows(slab) - (size_t{1} << base_bits_); }
  // Rows handed out of a slab.
  size_t SlabUsed(int slab) const;
  void AddSlab();

  // What lookups read, first.
  std::unique_ptr<RowCache> cache_;
  RowPieces rows_;  // none of a store with a cache
  uint32_t first_slab_rows_ = 1u << kMinBaseBits;
  int base_bits_ = kMinBaseBits;
  uint32_t high_water_ = 0;
  uint64_t capacity_ = 0;  // rows that the slabs hold
  alignas(64) SlabBases stamps_of_slab_{};
  SlabBases live_of_slab_{};  // bytes
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_;
  std::vector<ReusedRows*> watching_;
  std::optional<RowPieces> next_rows_;  // of another size, between PrepareRelayout and Relayout
  bool huge_pages_;
};

}  // namespace kvtable
