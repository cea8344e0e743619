// The index of one shard: key -> row number, in one cache line per probe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"
#include "memory/huge_pages.h"

namespace kvtable {

// Keys live in the bucket their hash names, or, where that is full, in the next one with room. A bucket
// counts the keys that passed it by on the way to their place, so a search for an absent key ends at the
// first bucket that nobody passed, and a removal needs no tombstone: it takes its own passage back.
struct alignas(64) Bucket {
  static constexpr int kKeys = 5;

  uint64_t keys[kKeys];
  uint32_t rows[kKeys];
  uint16_t count;     // the first `count` keys are valid
  uint16_t overflow;  // keys that passed by; stays at the maximum once there, which costs time and no result
};
static_assert(sizeof(Bucket) == 64);

class BucketIndex {
 public:
  static constexpr uint32_t kNoRow = UINT32_MAX;

  explicit BucketIndex(bool huge_pages) : huge_pages_(huge_pages) {}
  BucketIndex(const BucketIndex&) = delete;
  BucketIndex& operator=(const BucketIndex&) = delete;

  // The bucket a search begins at. What Find reads first: prefetch it.
  const Bucket* Home(uint64_t hash) const { return buckets_ + BucketOf(hash, num_buckets_); }

  // The row of `key` if it is in this bucket, or kNoRow.
  static uint32_t Match(uint64_t key, const Bucket* bucket) {
    // All five are compared, whatever the count, so that no branch depends on it.
    const uint32_t hits = static_cast<uint32_t>(bucket->keys[0] == key) |
                          static_cast<uint32_t>(bucket->keys[1] == key) << 1 |
                          static_cast<uint32_t>(bucket->keys[2] == key) << 2 |
                          static_cast<uint32_t>(bucket->keys[3] == key) << 3 |
                          static_cast<uint32_t>(bucket->keys[4] == key) << 4;
    const uint32_t valid = hits & ((1u << bucket->count) - 1);
    return valid != 0 ? bucket->rows[__builtin_ctz(valid)] : kNoRow;
  }

  // Where the search goes on from a bucket without the key, or null where it ends. `home` is Home(hash of
  // key).
  const Bucket* Next(const Bucket* bucket, const Bucket* home) const {
    if (bucket->overflow == 0) return nullptr;
    const Bucket* const next = bucket + 1 == buckets_ + num_buckets_ ? buckets_ : bucket + 1;
    return next == home ? nullptr : next;  // removals can leave every bucket passed by
  }

  // The row of `key`, or kNoRow, searched for from `bucket` on.
  uint32_t FindFrom(uint64_t key, const Bucket* bucket, const Bucket* home) const {
    for (; bucket != nullptr; bucket = Next(bucket, home)) {
      const uint32_t row = Match(key, bucket);
      if (row != kNoRow) return row;
    }
    return kNoRow;
  }

  uint32_t Find(uint64_t key, const Bucket* home) const { return FindFrom(key, home, home); }

  // Makes room for one more key, so that the next Insert cannot fail. Throws Error(kResourceExhausted).
  void PrepareInsert() {
    if (size_ >= max_size_) Grow();
  }

  // Adds a key that is not there. Needs PrepareInsert() first.
  void Insert(uint64_t key, uint64_t hash, uint32_t row) noexcept;

  // Removes a key and returns its row, or kNoRow.
  uint32_t Erase(uint64_t key, uint64_t hash) noexcept;

  // Makes room for `keys` keys in all.
  void Reserve(size_t keys);
  void Clear();

  size_t size() const { return size_; }
  size_t bytes() const { return memory_.size(); }

  // The most buckets that a search for a key in the index reads.
  int MaxProbeLength() const;

 private:
  static size_t MaxKeys(uint32_t buckets);
  void Grow();
  void Rebuild(uint32_t new_buckets);

  static Bucket empty_bucket_;  // what an index with no memory of its own searches; never written

  Region memory_;
  Bucket* buckets_ = &empty_bucket_;
  uint32_t num_buckets_ = 1;
  size_t size_ = 0;
  size_t max_size_ = 0;
  bool huge_pages_;
};

}  // namespace kvtable
