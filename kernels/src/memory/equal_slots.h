// Memory of many owners that grow alike, in slots of one size, side by side on huge pages: where each had pages of its own,
// most of the last one of each would lie idle.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/huge_pages.h"

namespace kvtable {

// The first owner that outgrows its slot makes a block of larger ones, one for each owner. The others are due to move there
// when they next grow by anything (BehindOthers), and the old block goes with the last of them.
class EqualSlots {
  struct Block;

 public:
  // `what` is named where the system refuses memory.
  EqualSlots(int owners, bool huge_pages, const char* what);
  EqualSlots(const EqualSlots&) = delete;
  EqualSlots& operator=(const EqualSlots&) = delete;

  // Zeroed memory of one owner, aligned to 64 bytes, given back when it goes, which must be before the EqualSlots.
  class Slot {
   public:
    Slot() = default;
    ~Slot();
    Slot(Slot&& other) noexcept;
    Slot& operator=(Slot&& other) noexcept;

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }

   private:
    friend class EqualSlots;

    EqualSlots* of_ = nullptr;
    char* data_ = nullptr;
    size_t bytes_ = 0;
    Region own_;  // where it is in no block
    std::shared_ptr<Block> block_;
    size_t owner_ = 0;
  };

  // At least `bytes`, a multiple of 64. Little memory, and that of an owner that has much more than the others, is in no
  // block. Throws Error(kResourceExhausted) or std::bad_alloc.
  Slot Take(int owner, size_t bytes);

  // Makes a block for owners that all are to take `bytes`.
  void Prepare(size_t bytes);

  // Whether others have moved to a block in which a slot waits for an owner of so much.
  bool BehindOthers(size_t bytes) const {
    const size_t slot = current_bytes_.load(std::memory_order_relaxed);
    return bytes < slot && Fits(bytes, slot);
  }

  // Bytes in memory that were given back, on pages that others are still on.
  size_t idle_bytes() const;

 private:
  // Below, each has pages of its own: what lies idle on few of them is little, and the owner can use it.
  static constexpr size_t kMany = 16;

  // Little does not keep a block of much.
  static bool Fits(size_t wanted, size_t slot) { return wanted <= slot && slot <= wanted + wanted / 2; }
  bool InBlock(size_t bytes) const { return owners_ >= kMany && huge_pages_ && bytes * owners_ >= kHugePage; }
  void BeginBlock(size_t bytes);  // under the lock
  void GiveBack(Slot* slot) noexcept;

  const size_t owners_;
  const bool huge_pages_;
  const char* const what_;
  mutable std::mutex mutex_;
  std::shared_ptr<Block> current_;        // null: all slots are in none, or in older ones
  std::atomic<size_t> current_bytes_{0};  // of its slots
  size_t taken_ = 0;                      // by all slots
  size_t idle_ = 0;
};

}  // namespace kvtable
