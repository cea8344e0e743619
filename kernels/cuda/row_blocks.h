// The memory of a table's rows in one kind of place, device or pinned host memory: blocks, each cut into
// slabs from its start.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device_block.h"

namespace kvtable {

template <class Device>
class RowBlocks {
 public:
  using Block = DeviceBlock<Device>;

  void Add(std::vector<Block> blocks) {
    for (Block& block : blocks) blocks_.push_back(std::move(block));
  }

  // Where slabs of so many bytes lie or have room, in order.
  std::vector<char*> Places(int64_t slab_bytes) const {
    std::vector<char*> places;
    for (const Block& block : blocks_) {
      for (int64_t s = 0; s < Fitting(block, slab_bytes); ++s)
        places.push_back(block.data() + s * slab_bytes);
    }
    return places;
  }

  // Frees the blocks that have none of the first `slabs` of these places.
  void KeepFirst(int64_t slabs, int64_t slab_bytes) {
    std::vector<Block> kept;
    for (Block& block : blocks_) {
      const int64_t fitting = Fitting(block, slab_bytes);
      if (slabs > 0 && fitting > 0) kept.push_back(std::move(block));
      slabs -= fitting;
    }
    blocks_ = std::move(kept);
  }

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Block& block : blocks_) bytes += static_cast<int64_t>(block.bytes());
    return bytes;
  }

  // The same without the blocks that are too small for a slab.
  int64_t BytesOfFitting(int64_t slab_bytes) const {
    int64_t bytes = 0;
    for (const Block& block : blocks_) {
      if (Fitting(block, slab_bytes) > 0) bytes += static_cast<int64_t>(block.bytes());
    }
    return bytes;
  }

 private:
  static int64_t Fitting(const Block& block, int64_t slab_bytes) {
    return static_cast<int64_t>(block.bytes()) / slab_bytes;
  }

  std::vector<Block> blocks_;
};

}  // namespace kvtable
