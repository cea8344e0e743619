// Where a key goes: a 64-bit mix, whose high bits choose the shard and whose low bits choose the bucket in
// it.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvtable {

inline constexpr int kMaxShardBits = 6;
inline constexpr int kMaxShards = 1 << kMaxShardBits;

// The finalizer of splitmix64 (Stafford's "mix 13"): a bijection in which each input bit flips about half of
// the output bits, so that sequential, strided and shifted keys spread evenly. Of a word, or of each in a vector.
template <class Words>
KVTABLE_HOST_DEVICE inline constexpr void MixInPlace(Words* words) {
  Words& x = *words;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  x = x ^ (x >> 31);
}
KVTABLE_HOST_DEVICE inline constexpr uint64_t Mix64(uint64_t x) {
  MixInPlace(&x);
  return x;
}

// The top `shard_bits` bits.
inline constexpr int ShardOf(uint64_t hash, int shard_bits) {
  return static_cast<int>((hash >> (64 - kMaxShardBits)) >> (kMaxShardBits - shard_bits));
}

// The low 32 bits scaled to [0, buckets). It preserves order: a hash that is lower in its low half never gets
// the higher bucket, whatever the number of buckets. Index growth relies on that.
inline constexpr uint32_t BucketOf(uint64_t hash, uint32_t buckets) {
  return static_cast<uint32_t>((static_cast<uint64_t>(static_cast<uint32_t>(hash)) * buckets) >> 32);
}

}  // namespace kvtable
