// The shards that a block of a lookup reads, for as long as it does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "table/read_seats.h"
#include "table/shard.h"

namespace kvtable {

// What a block may read of the shards that it wants: those that no writer has, which it keeps until it is done. It never
// waits with a shard in hand. Where it `waits` and gets none, it waits for one, and has that one.
class BlockHold {
 public:
  BlockHold(ReadSeats* seats, const std::vector<std::unique_ptr<Shard>>& all, uint64_t wanted, bool waits)
      : seats_(seats), all_(all), seat_(seats->Take(wanted, &shards_)) {
    if (seat_ != nullptr) return;
    for (uint64_t left = wanted; left != 0; left &= left - 1) {
      if (At(left).lock.try_lock_shared()) shards_ |= left & -left;
    }
    if (shards_ != 0 || !waits) return;
    At(wanted).lock.lock_shared();
    shards_ = wanted & -wanted;
  }
  ~BlockHold() {
    if (seat_ != nullptr) {
      seats_->Leave(seat_);
      return;
    }
    for (uint64_t left = shards_; left != 0; left &= left - 1) At(left).lock.unlock_shared();
  }
  BlockHold(const BlockHold&) = delete;
  BlockHold& operator=(const BlockHold&) = delete;

  uint64_t shards() const { return shards_; }

 private:
  const Shard& At(uint64_t left) const { return *all_[static_cast<size_t>(__builtin_ctzll(left))]; }
  ReadSeats* const seats_;
  const std::vector<std::unique_ptr<Shard>>& all_;
  uint64_t shards_ = 0;
  ReadSeats::Seat* const seat_;
};

}  // namespace kvtable
