#include "table/index.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr uint32_t kMinBuckets = 4;
constexpr uint32_t kMaxBuckets = uint32_t{1} << 31;  // more than rows can fill
// A tenth of the keys of a full index lie outside their home bucket, and right after growth it costs
// 64 / 5 / (kMaxLoad / kGrowth) = 20.5 bytes per key. Growth is a stream, so small steps are cheap.
constexpr double kMaxLoad = 0.75;
constexpr double kGrowth = 1.2;

}  // namespace

Bucket BucketIndex::empty_bucket_ = {};

size_t BucketIndex::MaxKeys(uint32_t buckets) {
  return static_cast<size_t>(static_cast<double>(buckets) * Bucket::kKeys * kMaxLoad);
}

void BucketIndex::Insert(uint64_t key, uint64_t hash, uint32_t row) noexcept {
  Bucket* bucket = buckets_ + BucketOf(hash, num_buckets_);
  while (bucket->count == Bucket::kKeys) {
    if (bucket->overflow != UINT16_MAX) ++bucket->overflow;
    if (++bucket == buckets_ + num_buckets_) bucket = buckets_;
  }
  bucket->keys[bucket->count] = key;
  bucket->rows[bucket->count] = row;
  ++bucket->count;
  ++size_;
}

uint32_t BucketIndex::Erase(uint64_t key, uint64_t hash) noexcept {
  Bucket* const home = buckets_ + BucketOf(hash, num_buckets_);
  for (Bucket* bucket = home;;) {
    for (int i = 0; i < bucket->count; ++i) {
      if (bucket->keys[i] != key) continue;
      const uint32_t row = bucket->rows[i];
      const int last = --bucket->count;
      bucket->keys[i] = bucket->keys[last];
      bucket->rows[i] = bucket->rows[last];
      --size_;
      for (Bucket* passed = home; passed != bucket;) {
        if (passed->overflow != UINT16_MAX) --passed->overflow;
        if (++passed == buckets_ + num_buckets_) passed = buckets_;
      }
      return row;
    }
    if (bucket->overflow == 0) return kNoRow;
    if (++bucket == buckets_ + num_buckets_) bucket = buckets_;
    if (bucket == home) return kNoRow;
  }
}

void BucketIndex::Reserve(size_t keys) {
  if (keys <= max_size_) return;
  const double buckets = static_cast<double>(keys) / (Bucket::kKeys * kMaxLoad) + 1;
  if (buckets >= static_cast<double>(kMaxBuckets)) {
    throw Error(ErrorCode::kResourceExhausted,
                "One shard of a table was to index " + std::to_string(keys) + " keys. Partition the table.");
  }
  Rebuild(std::max(kMinBuckets, static_cast<uint32_t>(buckets)));
}

void BucketIndex::Grow() {
  const double buckets = num_buckets_ * kGrowth + 1;
  Rebuild(std::max(kMinBuckets, static_cast<uint32_t>(std::min(buckets, static_cast<double>(kMaxBuckets)))));
}

// Old buckets come in the order of hashes, and BucketOf keeps that order: both arrays are walked front to
// back, at the speed of a copy.
void BucketIndex::Rebuild(uint32_t new_buckets) {
  // Where the memory would end in the second half of a huge page, the index takes the rest of it, too.
  constexpr uint32_t kPageBuckets = kHugePage / sizeof(Bucket);
  const uint32_t rest = new_buckets % kPageBuckets;
  if (huge_pages_ && rest >= kPageBuckets / 2) new_buckets += kPageBuckets - rest;
  Region old_memory(static_cast<size_t>(new_buckets) * sizeof(Bucket),
                    huge_pages_ ? Pages::kHuge : Pages::kOrdinary, "a table's index");
  std::swap(memory_, old_memory);
  const Bucket* old = buckets_;
  const uint32_t old_buckets = num_buckets_;
  buckets_ = reinterpret_cast<Bucket*>(memory_.data());
  num_buckets_ = new_buckets;
  max_size_ = MaxKeys(new_buckets);
  size_ = 0;
  for (uint32_t b = 0; b < old_buckets; ++b) {
    for (int i = 0; i < old[b].count; ++i) Insert(old[b].keys[i], Mix64(old[b].keys[i]), old[b].rows[i]);
  }
}

void BucketIndex::Clear() {
  memory_ = Region();
  buckets_ = &empty_bucket_;
  num_buckets_ = 1;
  size_ = 0;
  max_size_ = 0;
}

int BucketIndex::MaxProbeLength() const {
  int longest = 0;
  for (uint32_t b = 0; b < num_buckets_; ++b) {
    for (int i = 0; i < buckets_[b].count; ++i) {
      const uint32_t home = BucketOf(Mix64(buckets_[b].keys[i]), num_buckets_);
      const uint32_t distance = b >= home ? b - home : b + num_buckets_ - home;
      longest = std::max(longest, static_cast<int>(distance) + 1);
    }
  }
  return longest;
}

}  // namespace kvtable
