// Which rows of a shard are zeros because an optimizer's penalty made them so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtable {

// A bit per row, and no memory at all until the first call of Prepare.
class ZeroMarks {
 public:
  // Makes room for marks of rows [0, rows), so that Mark cannot fail. Throws std::bad_alloc.
  void Prepare(size_t rows) {
    if (words_.size() * 64 < rows) words_.resize((rows + 63) / 64);
  }
  void Mark(uint32_t row) noexcept {
    uint64_t& word = words_[row / 64];
    const uint64_t bit = uint64_t{1} << (row % 64);
    count_ += (word & bit) == 0 ? 1 : 0;
    word |= bit;
  }
  void Unmark(uint32_t row) noexcept {
    if (!Has(row)) return;
    words_[row / 64] &= ~(uint64_t{1} << (row % 64));
    --count_;
  }
  bool Has(uint32_t row) const {
    return count_ != 0 && row / 64 < words_.size() && (words_[row / 64] >> (row % 64) & 1) != 0;
  }
  void Clear() {
    words_ = {};
    count_ = 0;
  }

  int64_t count() const { return count_; }
  int64_t bytes() const { return static_cast<int64_t>(words_.capacity() * sizeof(uint64_t)); }

 private:
  std::vector<uint64_t> words_;
  int64_t count_ = 0;
};

}  // namespace kvtable
