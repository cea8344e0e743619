// Hashes of a block of keys, by the best instructions that the CPU has.
#pragma once

#include <cstdint>

namespace kvtable {

// hashes[i] = Mix64(keys[i]). Returns which shards have them: a bit for each.
using HashKeys = uint64_t (*)(const uint64_t* keys, int64_t n, int shard_bits, uint64_t* hashes);

HashKeys BestHashKeys();

}  // namespace kvtable
