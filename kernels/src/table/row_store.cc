#include "table/row_store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kvtable/types.h"
#include "memory/prefetch.h"

namespace kvtable {
namespace {

// Stamps are touched front to back in small steps, and ordinary pages waste less at the end; from this size
// on the waste is small against the slab.
constexpr size_t kHugeStampsFrom = size_t{16} << 20;

constexpr size_t kAhead = 8;  // free rows asked for before the one that is handed out

}  // namespace

size_t RowStore::SlabUsed(int slab) const {
  const size_t begin = SlabBegin(slab);
  return high_water_ <= begin ? 0 : std::min(SlabRows(slab), high_water_ - begin);
}

void RowStore::PrepareAllocate() {
  if (cache_ != nullptr) cache_->PrepareAllocate(next_row());
  if (!free_.empty()) return;
  if (high_water_ == capacity_) AddSlab();
  if (cache_ != nullptr) return;
  if (high_water_ == rows_.capacity()) rows_.Grow();
  if (next_rows_ && high_water_ == next_rows_->capacity()) next_rows_->Grow();
}

void RowStore::AddSlab() {
  const int slab = static_cast<int>(slabs_.size());
  const size_t rows = SlabRows(slab);
  if (capacity_ + rows > kMaxRows) {
    throw Error(ErrorCode::kResourceExhausted, "One shard of a table holds " + std::to_string(capacity_) +
                                                   " rows, the most it can. Use more shards (up to 64), or "
                                                   "partition the table.");
  }
  const size_t stamp_bytes = rows * sizeof(RowStamp);
  Slab added;
  added.stamps =
      Region(stamp_bytes, huge_pages_ && stamp_bytes >= kHugeStampsFrom ? Pages::kHuge : Pages::kOrdinary,
             "a table's stamps");
  added.live = Region(rows / 8, Pages::kOrdinary, "a table's liveness bits");
  slabs_.push_back(std::move(added));
  const uintptr_t begin = SlabBegin(slab);
  const size_t bits = static_cast<size_t>(base_bits_ + slab);
  stamps_of_slab_[bits] = reinterpret_cast<uintptr_t>(slabs_.back().stamps.data()) - begin * sizeof(RowStamp);
  live_of_slab_[bits] = reinterpret_cast<uintptr_t>(slabs_.back().live.data()) - begin / 8;
  capacity_ += rows;
}

uint32_t RowStore::Allocate() noexcept {
  uint32_t row;
  if (free_.empty()) {
    row = high_water_++;
  } else {
    row = free_.back();
    free_.pop_back();
    // Rows that went lie anywhere, and so do those that come in their places.
    if (free_.size() >= kAhead) {
      const uint32_t later = free_[free_.size() - kAhead];
      PrefetchToWrite(StampOf(later));
      if (cache_ == nullptr) PrefetchToWrite(rows_.Row(later));
    }
  }
  *LiveWord(row) |= uint64_t{1} << (row % 64);
  if (cache_ != nullptr) cache_->Allocate(row);
  for (ReusedRows* rows : watching_) rows->Add(row);
  return row;
}

void RowStore::Free(uint32_t row) noexcept {
  *LiveWord(row) &= ~(uint64_t{1} << (row % 64));
  if (cache_ != nullptr) cache_->Free(row);
  free_.push_back(row);
}

void RowStore::Clear() {
  if (cache_ != nullptr) cache_->Clear();
  slabs_.clear();
  slabs_.shrink_to_fit();
  rows_.Clear();
  free_.clear();
  free_.shrink_to_fit();
  high_water_ = 0;
  capacity_ = 0;
  if (next_rows_) next_rows_->Clear();
}

void RowStore::Reserve(size_t rows) {
  if (rows > kMaxRows) {
    throw Error(ErrorCode::kResourceExhausted, "One shard of a table was to hold " + std::to_string(rows) +
                                                   " rows; it can hold " + std::to_string(kMaxRows) +
                                                   ". Use more shards (up to 64), or partition the table.");
  }
  if (capacity_ > 0) return;  // slabs double, so what exists never has far to grow
  base_bits_ = kMinBaseBits;
  while ((size_t{1} << base_bits_) < rows && base_bits_ < 30) ++base_bits_;
  first_slab_rows_ = 1u << base_bits_;
}

void RowStore::PrepareRelayout(int64_t row_bytes, const ConvertRows& convert,
                               std::shared_ptr<SharedPages> pages) {
  if (cache_ != nullptr) return cache_->PrepareRelayout(row_bytes, convert);
  RowPieces next(row_bytes, std::move(pages));
  while (next.capacity() < high_water_) next.Grow();
  next_rows_ = std::move(next);
}

void RowStore::Relayout(const ConvertRows& convert) noexcept {
  if (cache_ != nullptr) {
    cache_->Relayout();
    return;
  }
  for (uint32_t row = 0; row < high_water_;) {
    const uint32_t old_run = rows_.Run(row);
    const uint32_t count = std::min({old_run, next_rows_->Run(row), high_water_ - row});
    convert(rows_.Row(row), next_rows_->Row(row), count);
    if (count == old_run) rows_.GiveBackPieceOf(row);
    row += count;
  }
  rows_ = std::move(*next_rows_);
  next_rows_.reset();
}

int64_t RowStore::TouchedRowBytes() const {
  return cache_ != nullptr ? cache_->TouchedRowBytes()
                           : static_cast<int64_t>(rows_.TouchedBytes(high_water_));
}

int64_t RowStore::TouchedColumnBytes() const {
  size_t bytes = free_.capacity() * sizeof(uint32_t);
  if (cache_ != nullptr) bytes += static_cast<size_t>(cache_->ColumnBytes());
  for (size_t k = 0; k < slabs_.size(); ++k) {
    const size_t used = SlabUsed(static_cast<int>(k));
    bytes +=
        slabs_[k].stamps.TouchedBytes(used * sizeof(RowStamp)) + slabs_[k].live.TouchedBytes(used / 8 + 1);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace kvtable
