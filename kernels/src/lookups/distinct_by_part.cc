// Ids are sorted into buckets by bits of their key's hash, in their order; a batch that is small enough is
// one bucket and is not sorted at all. Then each bucket is a task of its own, in which a little hash table
// numbers the different keys. Only these, which are often few, are taken apart by part.
#include "kvtable/distinct_by_part.h"

#include <algorithm>

#include "base/hash.h"
#include "lookups/distinct_keys.h"
#include "lookups/owners.h"
#include "memory/scratch.h"
#include "threads/task_list.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr int64_t kRange = 16384;         // ids sorted by one task
constexpr int64_t kIdsPerBucket = 65536;  // what sorting spares in cache misses does not pay for it below
constexpr int kMaxBucketBits = 8;

uint64_t Widen(int32_t key) { return WidenKey(key); }
uint64_t Widen(int64_t key) { return static_cast<uint64_t>(key); }
uint64_t Widen(uint64_t key) { return key; }

}  // namespace

// The ids of one batch in order of their bucket, equal buckets in order of the ids.
struct DistinctByPart::Sorted {
  explicit Sorted(const KeyBatch& b) : batch(b), n(b.n) {
    while (bits < kMaxBucketBits && (n >> bits) > kIdsPerBucket) ++bits;
    buckets = int64_t{1} << bits;
    // Written before they are read: `new` leaves them as they are.
    keys.reset(new uint64_t[static_cast<size_t>(n)]);
    number.reset(new uint32_t[static_cast<size_t>(n)]);
    bucket_begin = {0, static_cast<uint32_t>(n)};
    if (bits > 0) {
      bucket_of.reset(new uint32_t[static_cast<size_t>(n)]);
      id.reset(new uint32_t[static_cast<size_t>(n)]);
      begins.resize(static_cast<size_t>(ranges() * buckets));
      bucket_begin.resize(static_cast<size_t>(buckets) + 1);
    }
    unique.resize(static_cast<size_t>(buckets));
    unique_begin.resize(static_cast<size_t>(buckets * batch.parts));
    counts.resize(static_cast<size_t>(batch.parts));
  }

  // Tasks that sort.
  int64_t ranges() const { return bits == 0 ? 0 : (n + kRange - 1) / kRange; }

  void Count(int64_t r) {
    const int64_t first = r * kRange;
    const int64_t last = std::min(n, first + kRange);
    uint32_t* const counted = begins.data() + r * buckets;
    VisitSignedKeyType(batch.key_type, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(batch.keys);
      for (int64_t i = first; i < last; ++i) {
        const uint32_t bucket = static_cast<uint32_t>(Mix64(Widen(typed[i])) >> (64 - bits));
        bucket_of[static_cast<size_t>(i)] = bucket;
        ++counted[bucket];
      }
    });
  }

  void PlaceBuckets() {
    if (bits == 0) return;
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

  // Numbers the different keys of a bucket in order of appearance, moves them to its beginning, and counts
  // those of each part.
  void FindUnique(int64_t b) {
    const uint32_t first = bucket_begin[static_cast<size_t>(b)];
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    if (first == last) return;
    const uint64_t* const from = bits == 0 ? WideKeys() : keys.get() + first;
    const uint32_t found = NumberDistinctKeys(from, last - first, keys.get() + first,
                                              [&](uint32_t i, uint32_t k, bool) { number[first + i] = k; });
    unique[static_cast<size_t>(b)] = found;
    int64_t* const of_part = unique_begin.data() + b * batch.parts;
    ForEachPart(b, [&](uint32_t, int64_t part) { ++of_part[part]; });
  }

  void PlaceUnique() {
    for (int64_t b = 0; b < buckets; ++b) {
      for (int64_t part = 0; part < batch.parts; ++part) {
        int64_t& begin = unique_begin[static_cast<size_t>(b * batch.parts + part)];
        const int64_t count = begin;
        begin = counts[static_cast<size_t>(part)];
        counts[static_cast<size_t>(part)] += count;
      }
    }
  }

  void Write(int64_t b, const std::vector<Share>& shares, int64_t* places) const {
    const uint32_t first = bucket_begin[static_cast<size_t>(b)];
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    if (first == last) return;
    Scratch<int64_t> next(static_cast<size_t>(batch.parts));
    std::copy_n(unique_begin.data() + b * batch.parts, batch.parts, next.data());
    Scratch<int64_t> place_of(unique[static_cast<size_t>(b)]);
    ForEachPart(b, [&](uint32_t k, int64_t part) {
      const Share& share = shares[static_cast<size_t>(part)];
      const int64_t at = next[static_cast<size_t>(part)]++;
      share.keys[at] = static_cast<int64_t>(keys[first + k]);
      place_of[k] = share.first_place + at * share.stride;
    });
    if (bits == 0) {
      for (uint32_t i = 0; i < last; ++i) places[i] = place_of[number[i]];
    } else {
      for (uint32_t i = first; i < last; ++i) places[id[i]] = place_of[number[i]];
    }
  }

  // Calls visit(k, its part) for each of a bucket's different keys.
  template <class Visit>
  void ForEachPart(int64_t b, const Visit& visit) const {
    const uint32_t count = unique[static_cast<size_t>(b)];
    if (batch.parts == 1) {
      for (uint32_t k = 0; k < count; ++k) visit(k, int64_t{0});
      return;
    }
    const uint64_t* const found = keys.get() + bucket_begin[static_cast<size_t>(b)];
    VisitSignedKeyType(batch.key_type, [&](auto key) {
      using Key = decltype(key);
      const PartOf<Key> part_of(batch.parts);
      for (uint32_t k = 0; k < count; ++k) visit(k, part_of(static_cast<Key>(found[k])));
    });
  }

  // All keys in order of the ids.
  const uint64_t* WideKeys() {
    if (batch.key_type != KeyType::kInt32) return static_cast<const uint64_t*>(batch.keys);
    const int32_t* const narrow = static_cast<const int32_t*>(batch.keys);
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = Widen(narrow[i]);
    return keys.get();
  }

  const KeyBatch batch;
  const int64_t n;
  int bits = 0;  // of a key's hash in the number of its bucket
  int64_t buckets = 1;
  // Where there are several buckets:
  std::vector<uint32_t> begins;           // (ranges, buckets): where a range's first id of a bucket goes
  std::unique_ptr<uint32_t[]> bucket_of;  // (n) in order of the ids; what follows is sorted
  std::unique_ptr<uint32_t[]> id;         // (n)

  std::vector<uint32_t> bucket_begin;  // (buckets + 1)
  std::unique_ptr<uint64_t[]> keys;    // (n), later the different keys at the beginning of each bucket
  std::unique_ptr<uint32_t[]> number;  // (n): of the key among its bucket's different keys
  std::vector<uint32_t> unique;        // (buckets): how many different keys
  std::vector<int64_t> unique_begin;   // (buckets, parts): how many; later where they go in the part's share
  std::vector<int64_t> counts;         // (parts)
};

DistinctByPart::DistinctByPart(const std::vector<KeyBatch>& batches, ParallelFor& threads) {
  TaskList each, by_range, by_bucket;
  for (size_t b = 0; b < batches.size(); ++b) {
    sorted_.push_back(std::make_unique<Sorted>(batches[b]));
    each.Add(b, 1);
    by_range.Add(b, sorted_[b]->ranges());
    by_bucket.Add(b, sorted_[b]->buckets);
  }
  RunPhases(threads, std::max(by_range.size(), by_bucket.size()),
            by_range.AsPhase([&](size_t b, int64_t r) { sorted_[b]->Count(r); }),
            each.AsPhase([&](size_t b, int64_t) { sorted_[b]->PlaceBuckets(); }),
            by_range.AsPhase([&](size_t b, int64_t r) { sorted_[b]->Sort(r); }),
            by_bucket.AsPhase([&](size_t b, int64_t bucket) { sorted_[b]->FindUnique(bucket); }));
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
  by_bucket.Run(threads, [&](size_t b, int64_t bucket) { sorted_[b]->Write(bucket, shares[b], places[b]); });
}

}  // namespace kvtable
