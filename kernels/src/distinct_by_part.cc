// Ids are sorted into buckets by part and by bits of their key's hash, in their order; then each bucket is a
// task of its own, in which a little hash table numbers the different keys.
#include "kvtable/distinct_by_part.h"

#include <algorithm>

#include "distinct_keys.h"
#include "elements.h"
#include "hash.h"
#include "owners.h"
#include "task_list.h"

namespace kvtable {
namespace {

constexpr int64_t kRange = 16384;  // ids sorted by one task
constexpr int64_t kIdsPerBucket = 16384;
constexpr int kMaxBucketBits = 8;
constexpr int64_t kMostBuckets = 1024;  // of all parts, where parts allow

uint64_t Widen(int32_t key) { return WidenKey(key); }
uint64_t Widen(int64_t key) { return static_cast<uint64_t>(key); }
uint64_t Widen(uint64_t key) { return key; }

}  // namespace

// The ids of one batch in order of their bucket, equal buckets in order of the ids.
struct DistinctByPart::Sorted {
  explicit Sorted(const KeyBatch& b) : batch(b), n(b.n) {
    while (bits < kMaxBucketBits && (n >> bits) > kIdsPerBucket * b.parts &&
           (b.parts << (bits + 1)) <= kMostBuckets) {
      ++bits;
    }
    buckets = b.parts << bits;
    begins.resize(static_cast<size_t>(ranges() * buckets));
    bucket_begin.resize(static_cast<size_t>(buckets) + 1);
    // Written before they are read: `new` leaves them as they are.
    bucket_of.reset(new uint32_t[static_cast<size_t>(n)]);
    keys.reset(new uint64_t[static_cast<size_t>(n)]);
    id.reset(new uint32_t[static_cast<size_t>(n)]);
    number.reset(new uint32_t[static_cast<size_t>(n)]);
    unique.resize(static_cast<size_t>(buckets));
    unique_begin.resize(static_cast<size_t>(buckets));
  }

  int64_t ranges() const { return (n + kRange - 1) / kRange; }

  void Count(int64_t r) {
    const int64_t first = r * kRange;
    const int64_t last = std::min(n, first + kRange);
    uint32_t* const counts = begins.data() + r * buckets;
    VisitSignedKeyType(batch.key_type, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(batch.keys);
      const PartOf<Key> part_of(batch.parts);
      for (int64_t i = first; i < last; ++i) {
        uint32_t bucket = static_cast<uint32_t>(batch.parts == 1 ? 0 : part_of(typed[i])) << bits;
        if (bits > 0) bucket |= static_cast<uint32_t>(Mix64(Widen(typed[i])) >> (64 - bits));
        bucket_of[static_cast<size_t>(i)] = bucket;
        ++counts[bucket];
      }
    });
  }

  void PlaceBuckets() {
    uint32_t total = 0;
    for (int64_t b = 0; b < buckets; ++b) {
      bucket_begin[static_cast<size_t>(b)] = total;
      for (int64_t r = 0; r < ranges(); ++r) {
        uint32_t& begin = begins[static_cast<size_t>(r * buckets + b)];
        const uint32_t count = begin;
        begin = total;
        total += count;
      }
    }
    bucket_begin.back() = total;
  }

  void Sort(int64_t r) {
    const int64_t first = r * kRange;
    const int64_t last = std::min(n, first + kRange);
    uint32_t* const next = begins.data() + r * buckets;
    VisitSignedKeyType(batch.key_type, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(batch.keys);
      for (int64_t i = first; i < last; ++i) {
        const uint32_t at = next[bucket_of[static_cast<size_t>(i)]]++;
        keys[at] = Widen(typed[i]);
        id[at] = static_cast<uint32_t>(i);
      }
    });
  }

  // Numbers the different keys of a bucket in order of appearance, and moves them to its beginning.
  void FindUnique(int64_t b) {
    const uint32_t first = bucket_begin[static_cast<size_t>(b)];
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    if (first == last) return;
    unique[static_cast<size_t>(b)] =
        NumberDistinctKeys(keys.get() + first, last - first, keys.get() + first,
                           [&](uint32_t i, uint32_t n, bool) { number[first + i] = n; });
  }

  void PlaceUnique() {
    for (int64_t part = 0, b = 0; part < batch.parts; ++part) {
      int64_t total = 0;
      for (int64_t i = 0; i < int64_t{1} << bits; ++i, ++b) {
        unique_begin[static_cast<size_t>(b)] = total;
        total += unique[static_cast<size_t>(b)];
      }
      counts.push_back(total);
    }
  }

  void Write(int64_t b, const Share& share, int64_t* places) const {
    const uint32_t first = bucket_begin[static_cast<size_t>(b)];
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    const int64_t to = unique_begin[static_cast<size_t>(b)];
    for (uint32_t i = 0; i < unique[static_cast<size_t>(b)]; ++i) {
      share.keys[to + i] = static_cast<int64_t>(keys[first + i]);
    }
    for (uint32_t i = first; i < last; ++i) {
      places[id[i]] = share.first_place + (to + number[i]) * share.stride;
    }
  }

  const KeyBatch batch;
  const int64_t n;
  int bits = 0;  // of a key's hash in the number of its bucket, below its part
  int64_t buckets = 1;
  std::vector<uint32_t> begins;           // (ranges, buckets): where a range's first id of a bucket goes
  std::vector<uint32_t> bucket_begin;     // (buckets + 1)
  std::unique_ptr<uint32_t[]> bucket_of;  // (n) in order of the ids; all others are sorted
  std::unique_ptr<uint64_t[]> keys;       // (n), later the different keys at the beginning of each bucket
  std::unique_ptr<uint32_t[]> id;         // (n)
  std::unique_ptr<uint32_t[]> number;     // (n): of the key among its bucket's different keys
  std::vector<uint32_t> unique;           // (buckets): how many different keys
  std::vector<int64_t> unique_begin;      // (buckets): where they go in the part's share
  std::vector<int64_t> counts;            // (parts)
};

DistinctByPart::DistinctByPart(const std::vector<KeyBatch>& batches, ParallelFor& threads) {
  TaskList each, by_range, by_bucket;
  for (size_t b = 0; b < batches.size(); ++b) {
    sorted_.push_back(std::make_unique<Sorted>(batches[b]));
    each.Add(b, 1);
    by_range.Add(b, sorted_[b]->ranges());
    by_bucket.Add(b, sorted_[b]->buckets);
  }
  by_range.Run(threads, [&](size_t b, int64_t r) { sorted_[b]->Count(r); });
  each.Run(threads, [&](size_t b, int64_t) { sorted_[b]->PlaceBuckets(); });
  by_range.Run(threads, [&](size_t b, int64_t r) { sorted_[b]->Sort(r); });
  by_bucket.Run(threads, [&](size_t b, int64_t bucket) { sorted_[b]->FindUnique(bucket); });
  for (const auto& sorted : sorted_) sorted->PlaceUnique();
}

DistinctByPart::~DistinctByPart() = default;

int64_t DistinctByPart::count(size_t b, int64_t part) const {
  return sorted_[b]->counts[static_cast<size_t>(part)];
}

void DistinctByPart::Write(const std::vector<std::vector<Share>>& shares, const std::vector<int64_t*>& places,
                           ParallelFor& threads) const {
  TaskList by_bucket;
  for (size_t b = 0; b < sorted_.size(); ++b) by_bucket.Add(b, sorted_[b]->buckets);
  by_bucket.Run(threads, [&](size_t b, int64_t bucket) {
    sorted_[b]->Write(bucket, shares[b][static_cast<size_t>(bucket >> sorted_[b]->bits)], places[b]);
  });
}

}  // namespace kvtable
