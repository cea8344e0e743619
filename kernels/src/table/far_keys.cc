#include "table/far_keys.h"

#include <utility>

namespace kvtable {

void FarKeys::Insert(uint64_t hash, uint32_t row) noexcept {
  size_t at = Home(hash);
  while (entries()[at].row_plus_1 != 0) at = (at + 1) & mask_;
  entries()[at] = {hash, uint64_t{row} + 1};
  ++size_;
}

uint32_t FarKeys::Erase(uint64_t hash) noexcept {
  if (size_ == 0) return kNoRow;
  size_t at = Home(hash);
  while (entries()[at].row_plus_1 != 0 && entries()[at].hash != hash) at = (at + 1) & mask_;
  if (entries()[at].row_plus_1 == 0) return kNoRow;
  const uint32_t row = static_cast<uint32_t>(entries()[at].row_plus_1 - 1);
  // What follows moves up, where its search would end at the hole.
  for (size_t next = (at + 1) & mask_; entries()[next].row_plus_1 != 0; next = (next + 1) & mask_) {
    const size_t home = Home(entries()[next].hash);
    if (((next - home) & mask_) < ((next - at) & mask_)) continue;
    entries()[at] = entries()[next];
    at = next;
  }
  entries()[at] = {0, 0};
  --size_;
  return row;
}

void FarKeys::Grow() {
  FarKeys next;
  const size_t entries = memory_.size() == 0 ? 4 : 2 * (mask_ + 1);
  next.memory_ = Region(entries * sizeof(Entry), Pages::kOrdinary, "a table's index");
  next.mask_ = entries - 1;
  ForEach([&](uint64_t hash, uint32_t row) { next.Insert(hash, row); });
  *this = std::move(next);
}

}  // namespace kvtable
