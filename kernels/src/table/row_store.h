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

namespace kvtable {

// What is kept beside each row.
struct RowStamp {
  uint64_t key;
  uint32_t frequency;
  uint32_t version;
};

// Slabs whose sizes double: slab k holds `base << k` rows. A row number leads to its slab by counting leading
// zeros, so there is no table of slabs to chase, and a slab's memory is touched only as its rows are handed
// out.
//
// Pages: the rows of slabs below kNurseryFrom bytes come from the heap, those of slabs from kHugePage bytes
// on are mapped on huge pages. The rows of slabs in between share one mapping, the nursery, on ordinary
// pages, which turn into huge ones when it is full. So a small table costs little, and a large one is on huge
// pages but for a few rows.
class RowStore {
 public:
  static constexpr int kMinBaseBits = 6;                   // whole words of the liveness bitmap
  static constexpr uint32_t kMaxRows = uint32_t{3} << 30;  // row + first slab's rows must fit in 32 bits

  // With `cache`, rows are where that has them, and slabs hold what is beside them.
  RowStore(int64_t row_bytes, bool huge_pages, std::unique_ptr<RowCache> cache = nullptr)
      : row_bytes_(row_bytes), cache_(std::move(cache)), huge_pages_(huge_pages) {}
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // The bytes of a row; of a store with a cache, of one that is in memory.
  char* Row(uint32_t row) const {
    if (__builtin_expect(cache_ != nullptr, 0)) return cache_->Row(row);
    return reinterpret_cast<char*>(rows_of_slab_[SlabBits(row)] + row * static_cast<uintptr_t>(row_bytes_));
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
  // `convert` makes rows of the old size ones of the new size.
  void PrepareRelayout(int64_t row_bytes, const ConvertRows& convert);
  void Relayout(const ConvertRows& convert) noexcept;
  void CancelRelayout() noexcept {
    if (cache_ != nullptr) cache_->CancelRelayout();
    relayout_.reset();
  }

  int64_t row_bytes() const { return row_bytes_; }
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
  static constexpr size_t kNurseryFrom = size_t{64} << 10;

  struct Slab {
    Region rows;  // empty for a slab in the nursery
    Region stamps;
    Region live;
  };
  // Addresses from which row * size leads to the element: the slab's memory less what earlier slabs hold.
  // Numbers, because no pointer may lie outside its array. Those of slab k are at base_bits_ + k: the highest bit of
  // the sum of a row's number and first_slab_rows_. Most rows are in the last two slabs, so that lookups read one line.
  using SlabBases = std::array<uintptr_t, 32>;
  static constexpr int kMaxSlabs = 32 - kMinBaseBits + 1;
  // Where rows of another size are going to lie.
  struct NextRows {
    int64_t row_bytes;
    std::vector<Region> slabs;  // as Slab::rows
    Region nursery;
  };

  size_t SlabBits(uint32_t row) const {
    return 31 - static_cast<size_t>(__builtin_clz(row + first_slab_rows_));
  }
  uint64_t* LiveWord(uint32_t row) const {
    return reinterpret_cast<uint64_t*>(live_of_slab_[SlabBits(row)] + row / 64 * sizeof(uint64_t));
  }
  size_t SlabRows(int slab) const { return size_t{1} << (base_bits_ + slab); }
  size_t SlabBegin(int slab) const { return SlabRows(slab) - (size_t{1} << base_bits_); }
  size_t SlabBytes(int slab, int64_t row_bytes) const {
    return SlabRows(slab) * static_cast<size_t>(row_bytes);
  }
  bool InNursery(int slab, int64_t row_bytes) const {
    const size_t bytes = SlabBytes(slab, row_bytes);
    return huge_pages_ && bytes >= kNurseryFrom && bytes < kHugePage;
  }
  // The memory of a slab's rows, empty for one in the nursery; makes the nursery where it is the first there.
  Region MakeRows(int slab, int64_t row_bytes, Region* nursery) const;
  // An empty region for the nursery of rows of this size, and a slab's place in it. Slab k begins where twice
  // as many rows as slab k - 1 holds would end, so all of them fit.
  Region MakeNursery(int64_t row_bytes) const;
  char* SlabData(int slab) const {
    if (cache_ != nullptr) return nullptr;
    return InNursery(slab, row_bytes_) ? nursery_.data() + SlabBytes(slab, row_bytes_)
                                       : slabs_[static_cast<size_t>(slab)].rows.data();
  }
  // Rows handed out of a slab.
  size_t SlabUsed(int slab) const;
  void PointAt(int slab);

  // What lookups read, first.
  int64_t row_bytes_;
  std::unique_ptr<RowCache> cache_;
  uint32_t first_slab_rows_ = 1u << kMinBaseBits;
  int base_bits_ = kMinBaseBits;
  uint32_t high_water_ = 0;
  uint64_t capacity_ = 0;  // rows that the slabs hold
  alignas(64) SlabBases rows_of_slab_{};
  SlabBases stamps_of_slab_{};
  SlabBases live_of_slab_{};  // bytes
  Region nursery_;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_;
  std::vector<ReusedRows*> watching_;
  std::optional<NextRows> relayout_;
  bool huge_pages_;
};

}  // namespace kvtable
