#include "table/hash_keys.h"

#include <array>
#include <cstring>

#include "base/hash.h"
#include "base/instruction_set.h"

namespace kvtable {
namespace {

uint64_t HashOneByOne(const uint64_t* keys, int64_t n, int shard_bits, uint64_t* hashes) {
  uint64_t shards = 0;
  for (int64_t i = 0; i < n; ++i) {
    hashes[i] = Mix64(keys[i]);
    shards |= uint64_t{1} << ShardOf(hashes[i], shard_bits);
  }
  return shards;
}

#if defined(__x86_64__)
// The compiler makes no vectors of such a loop by itself. AVX2, which cannot multiply such words, has nothing to gain.
KVTABLE_TARGET_AVX512 uint64_t HashAvx512(const uint64_t* keys, int64_t n, int shard_bits, uint64_t* hashes) {
  typedef uint64_t Words __attribute__((vector_size(64), aligned(alignof(uint64_t)), may_alias));
  constexpr int64_t kEach = sizeof(Words) / sizeof(uint64_t);
  Words shards = {};
  int64_t i = 0;
  for (; i + kEach <= n; i += kEach) {
    Words hash = *reinterpret_cast<const Words*>(keys + i);
    MixInPlace(&hash);
    *reinterpret_cast<Words*>(hashes + i) = hash;
    shards |= (Words{} + 1) << ((hash >> (64 - kMaxShardBits)) >> (kMaxShardBits - shard_bits));
  }
  uint64_t all = HashOneByOne(keys + i, n - i, shard_bits, hashes + i);
  std::array<uint64_t, kEach> each;
  std::memcpy(each.data(), &shards, sizeof(Words));
  for (const uint64_t some : each) all |= some;
  return all;
}
#endif

}  // namespace

HashKeys BestHashKeys() {
#if defined(__x86_64__)
  if (BestInstructionSet() == InstructionSet::kAvx512) return HashAvx512;
#endif
  return HashOneByOne;
}

}  // namespace kvtable
