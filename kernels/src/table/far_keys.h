// The few keys of an index that found no room near their home.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/huge_pages.h"

namespace kvtable {

// Hash -> row, by linear probing at half load or less. Of keys that hash at random one in 50,000 is here; of keys that
// were made to meet in one bucket, nearly all.
class FarKeys {
 public:
  static constexpr uint32_t kNoRow = UINT32_MAX;

  size_t size() const { return size_; }
  size_t bytes() const { return memory_.size(); }

  uint32_t Find(uint64_t hash) const {
    for (size_t at = Home(hash); entries()[at].row_plus_1 != 0; at = (at + 1) & mask_) {
      if (entries()[at].hash == hash) return static_cast<uint32_t>(entries()[at].row_plus_1 - 1);
    }
    return kNoRow;
  }

  // Makes sure that the next Insert cannot fail. Throws Error(kResourceExhausted).
  void PrepareInsert() {
    if (2 * (size_ + 1) > memory_.size() / sizeof(Entry)) Grow();
  }
  // Adds a key that is not there. Needs PrepareInsert() first.
  void Insert(uint64_t hash, uint32_t row) noexcept;
  // Removes a key and returns its row, or kNoRow.
  uint32_t Erase(uint64_t hash) noexcept;

  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (size_t at = 0; size_ > 0 && at <= mask_; ++at) {
      if (entries()[at].row_plus_1 != 0)
        visit(entries()[at].hash, static_cast<uint32_t>(entries()[at].row_plus_1 - 1));
    }
  }

 private:
  struct Entry {
    uint64_t hash;
    uint64_t row_plus_1;  // 0: none
  };

  Entry* entries() const { return reinterpret_cast<Entry*>(memory_.data()); }
  // By other bits than those that brought the keys here.
  size_t Home(uint64_t hash) const { return static_cast<size_t>(hash * 0x9e3779b97f4a7c15ULL >> 32) & mask_; }
  void Grow();

  Region memory_;
  size_t mask_ = 0;  // entries less one
  size_t size_ = 0;
};

}  // namespace kvtable
