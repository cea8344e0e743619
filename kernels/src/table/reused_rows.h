// Which of the rows that a store had at some moment it has handed out again since, so that an export can leave
// them out: their keys may have come already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtable {

class ReusedRows {
 public:
  // Of the rows [0, end).
  explicit ReusedRows(uint32_t end) : end_(end), words_((size_t{end} + 63) / 64) {}

  uint32_t end() const { return end_; }
  void Add(uint32_t row) noexcept {
    if (row < end_) words_[row / 64] |= uint64_t{1} << (row % 64);
  }
  bool Has(uint32_t row) const { return (words_[row / 64] >> (row % 64) & 1) != 0; }

 private:
  uint32_t end_;
  std::vector<uint64_t> words_;
};

}  // namespace kvtable
