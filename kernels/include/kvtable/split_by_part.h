// A batch of keys and rows, taken apart by the part that owns each key.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {

class SplitByPart {
 public:
  // One part's share, in the order of the batch. All but `keys` may be null.
  struct Share {
    void* keys;                  // (count)
    void* rows;                  // (count, row_bytes)
    uint64_t* positions;         // (count)
    uint32_t* places = nullptr;  // (count): where in the batch each key was
  };

  // keys (n) stay the caller's.
  SplitByPart(KeyType key_type, const void* keys, int64_t n, int64_t parts, ParallelFor& threads);

  // How many keys belong to a part.
  int64_t count(int64_t part) const { return counts_[static_cast<size_t>(part)]; }

  // Copies keys and, unless null, rows (n, row_bytes) and positions (n) to the parts' shares, and says the places.
  void Write(const void* rows, int64_t row_bytes, const uint64_t* positions, const std::vector<Share>& shares,
             ParallelFor& threads) const;

 private:
  int64_t ranges() const { return (n_ + kRange - 1) / kRange; }

  static constexpr int64_t kRange = 8192;

  KeyType key_type_;
  const void* keys_;
  int64_t n_;
  int64_t parts_;
  std::unique_ptr<uint32_t[]> owners_;  // (n)
  std::vector<int64_t> begins_;         // (ranges, parts): where a range's first key of a part goes
  std::vector<int64_t> counts_;         // (parts)
};

}  // namespace kvtable
