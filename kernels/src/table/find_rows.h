// The rows of a block of keys: where every lookup begins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/always_inline.h"
#include "base/hash.h"
#include "table/search_buckets.h"
#include "table/shard.h"

namespace kvtable {

inline constexpr int64_t kBlock = 512;  // keys of a lookup under one set of locks: what writers wait for

// Where the keys of a block are searched, by their hashes. Of one table:
struct OneTable {
  const std::unique_ptr<Shard>* shards;
  int shard_bits;
  const uint64_t* hashes;

  KVTABLE_ALWAYS_INLINE uint64_t hash(int64_t i) const { return hashes[i]; }
  KVTABLE_ALWAYS_INLINE size_t number(int64_t i) const {
    return static_cast<size_t>(ShardOf(hashes[i], shard_bits));
  }
  KVTABLE_ALWAYS_INLINE const Shard& shard(int64_t i) const { return *shards[number(i)]; }
};
// Of several tables, with the numbers of the shards, all tables' one behind the other, in a list:
struct SeveralTables {
  const Shard* const* shards;
  const uint16_t* numbers;
  const uint64_t* hashes;

  KVTABLE_ALWAYS_INLINE uint64_t hash(int64_t i) const { return hashes[i]; }
  KVTABLE_ALWAYS_INLINE size_t number(int64_t i) const { return numbers[i]; }
  KVTABLE_ALWAYS_INLINE const Shard& shard(int64_t i) const { return *shards[numbers[i]]; }
};

// rows[i] = the row of the i-th key in its shard, or kNoRow; of up to kBlock keys whose shards are held. Each step asks for
// the memory that the next one reads.
template <class Places>
KVTABLE_ALWAYS_INLINE inline void FindRows(const Places& places, int64_t count, uint32_t* rows) {
  static const SearchHomes search_homes = BestSearchHomes();
  std::array<BucketRef, kBlock> homes;
  std::array<uint32_t, kBlock> elsewhere;  // keys that are not in the bucket that is their home
  for (int64_t i = 0; i < count; ++i) {
    const BucketRef home = places.shard(i).index.Home(places.hash(i));
    __builtin_prefetch(home.bucket(), 0, 2);
    homes[static_cast<size_t>(i)] = home;
  }
  const int64_t misses = search_homes(places.hashes, homes.data(), count, rows, elsewhere.data());
  // A bucket further in each round, so that all of them wait for memory together.
  std::array<BucketRef, kBlock> at;
  for (int64_t m = 0; m < misses; ++m) at[static_cast<size_t>(m)] = homes[elsewhere[static_cast<size_t>(m)]];
  for (int64_t left = misses; left > 0;) {
    int64_t kept = 0;
    for (int64_t m = 0; m < left; ++m) {
      const uint32_t i = elsewhere[static_cast<size_t>(m)];
      const BucketRef before = at[static_cast<size_t>(m)];
      if (before.bucket()->passed() == 0) continue;
      const BucketIndex& index = places.shard(i).index;
      const BucketRef bucket = index.Next(before, homes[i]);
      rows[i] = bucket ? BucketIndex::Match(places.hash(i), bucket) : index.FindFar(places.hash(i));
      if (!bucket || rows[i] != BucketIndex::kNoRow) continue;
      __builtin_prefetch(bucket.bucket() + 1);
      elsewhere[static_cast<size_t>(kept)] = i;
      at[static_cast<size_t>(kept++)] = bucket;
    }
    left = kept;
  }
}

}  // namespace kvtable
