// The different keys of a batch, taken apart by the part that owns each, and where each id finds its own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {

struct KeyBatch {
  KeyType key_type;
  const void* keys;  // (n), n < 2^32
  int64_t n;
  int64_t parts;  // key k belongs to part k floor-mod parts
};

// A part's keys come in an order that depends on the batch alone, whatever the number of threads.
class DistinctByPart {
 public:
  // One part's share of a batch. Its keys have places: `first_place`, and `stride` more each.
  struct Share {
    int64_t* keys;  // (count): int32 sign-extended, the bits of uint64
    int64_t first_place;
    int64_t stride;
  };

  // Finds the keys. The batches' keys stay the caller's.
  DistinctByPart(const std::vector<KeyBatch>& batches, ParallelFor& threads);
  ~DistinctByPart();
  DistinctByPart(const DistinctByPart&) = delete;
  DistinctByPart& operator=(const DistinctByPart&) = delete;

  // How many different keys of batch b belong to a part.
  int64_t count(size_t b, int64_t part) const;

  // Writes the keys of shares[b][part], and to places[b] (n) the place of each id's key.
  void Write(const std::vector<std::vector<Share>>& shares, const std::vector<int64_t*>& places,
             ParallelFor& threads) const;

 private:
  struct Sorted;
  std::vector<std::unique_ptr<Sorted>> sorted_;  // of each batch
};

}  // namespace kvtable
