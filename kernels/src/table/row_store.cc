#include "table/row_store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

// Stamps are touched front to back in small steps, and ordinary pages waste less at the end; from this size
// on the waste is small against the slab.
constexpr size_t kHugeStampsFrom = size_t{16} << 20;

}  // namespace

size_t RowStore::SlabUsed(int slab) const {
  const size_t begin = SlabBegin(slab);
  return high_water_ <= begin ? 0 : std::min(SlabRows(slab), high_water_ - begin);
}

void RowStore::PointAt(int slab) {
  const uintptr_t begin = SlabBegin(slab);
  const Slab& s = slabs_[slab];
  const size_t bits = static_cast<size_t>(base_bits_ + slab);
  rows_of_slab_[bits] =
      reinterpret_cast<uintptr_t>(SlabData(slab)) - begin * static_cast<uintptr_t>(row_bytes_);
  stamps_of_slab_[bits] = reinterpret_cast<uintptr_t>(s.stamps.data()) - begin * sizeof(RowStamp);
  live_of_slab_[bits] = reinterpret_cast<uintptr_t>(s.live.data()) - begin / 8;
}

void RowStore::PrepareAllocate() {
  if (cache_ != nullptr) cache_->PrepareAllocate(next_row());
  if (!free_.empty() || high_water_ < capacity_) return;
  const int slab = static_cast<int>(slabs_.size());
  const size_t rows = SlabRows(slab);
  if (capacity_ + rows > kMaxRows) {
    throw Error(ErrorCode::kResourceExhausted, "One shard of a table holds " + std::to_string(capacity_) +
                                                   " rows, the most it can. Use more shards (up to 64), or "
                                                   "partition the table.");
  }
  slabs_.reserve(slabs_.size() + 1);
  Slab added;
  if (cache_ == nullptr) added.rows = MakeRows(slab, row_bytes_, &nursery_);
  const size_t stamp_bytes = rows * sizeof(RowStamp);
  added.stamps =
      Region(stamp_bytes, huge_pages_ && stamp_bytes >= kHugeStampsFrom ? Pages::kHuge : Pages::kOrdinary,
             "a table's stamps");
  added.live = Region(rows / 8, Pages::kOrdinary, "a table's liveness bits");
  if (relayout_) relayout_->slabs.push_back(MakeRows(slab, relayout_->row_bytes, &relayout_->nursery));
  slabs_.push_back(std::move(added));
  PointAt(slab);
  capacity_ += rows;
  if (slab > 0 && InNursery(slab - 1, row_bytes_) && !InNursery(slab, row_bytes_)) nursery_.Collapse();
}

Region RowStore::MakeRows(int slab, int64_t row_bytes, Region* nursery) const {
  if (!InNursery(slab, row_bytes)) {
    return Region(SlabBytes(slab, row_bytes), huge_pages_ ? Pages::kHuge : Pages::kOrdinary,
                  "a table's rows");
  }
  if (nursery->data() == nullptr) *nursery = MakeNursery(row_bytes);
  return Region();
}

Region RowStore::MakeNursery(int64_t row_bytes) const {
  int beyond = 0;
  while (SlabBytes(beyond, row_bytes) < kHugePage) ++beyond;
  return Region(SlabBytes(beyond, row_bytes), Pages::kHugeOnceFull, "a table's rows");
}

uint32_t RowStore::Allocate() noexcept {
  uint32_t row;
  if (free_.empty()) {
    row = high_water_++;
  } else {
    row = free_.back();
    free_.pop_back();
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
  nursery_ = Region();
  free_.clear();
  free_.shrink_to_fit();
  high_water_ = 0;
  capacity_ = 0;
  if (relayout_) {
    relayout_->slabs.clear();
    relayout_->nursery = Region();
  }
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

void RowStore::PrepareRelayout(int64_t row_bytes, const ConvertRows& convert) {
  if (cache_ != nullptr) return cache_->PrepareRelayout(row_bytes, convert);
  NextRows next;
  next.row_bytes = row_bytes;
  next.slabs.reserve(kMaxSlabs);  // so that PrepareAllocate can add to them
  for (int k = 0; k < static_cast<int>(slabs_.size()); ++k) {
    next.slabs.push_back(MakeRows(k, row_bytes, &next.nursery));
  }
  relayout_ = std::move(next);
}

void RowStore::Relayout(const ConvertRows& convert) noexcept {
  if (cache_ != nullptr) {
    row_bytes_ = cache_->Relayout();
    return;
  }
  const int slabs = static_cast<int>(slabs_.size());
  const int64_t row_bytes = relayout_->row_bytes;
  for (int k = 0; k < slabs; ++k) {
    const Region& rows = relayout_->slabs[static_cast<size_t>(k)];
    char* const to =
        InNursery(k, row_bytes) ? relayout_->nursery.data() + SlabBytes(k, row_bytes) : rows.data();
    convert(SlabData(k), to, static_cast<uint32_t>(SlabUsed(k)));
    slabs_[static_cast<size_t>(k)].rows = Region();
  }
  row_bytes_ = row_bytes;
  nursery_ = std::move(relayout_->nursery);
  for (int k = 0; k < slabs; ++k) {
    slabs_[static_cast<size_t>(k)].rows = std::move(relayout_->slabs[static_cast<size_t>(k)]);
    PointAt(k);
  }
  relayout_.reset();
  if (slabs > 0 && !InNursery(slabs - 1, row_bytes_)) nursery_.Collapse();
}

int64_t RowStore::TouchedRowBytes() const {
  if (cache_ != nullptr) return cache_->TouchedRowBytes();
  size_t bytes = 0;
  size_t nursery_end = 0;
  for (int k = 0; k < static_cast<int>(slabs_.size()); ++k) {
    const size_t used = SlabUsed(k) * static_cast<size_t>(row_bytes_);
    if (!InNursery(k, row_bytes_)) {
      bytes += slabs_[static_cast<size_t>(k)].rows.TouchedBytes(used);
    } else if (used > 0) {
      nursery_end = SlabBytes(k, row_bytes_) + used;
    }
  }
  return static_cast<int64_t>(bytes + nursery_.TouchedBytes(nursery_end));
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
