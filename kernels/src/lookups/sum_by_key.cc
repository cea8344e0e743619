// Ids are sorted into buckets by part and by bits of their key's hash, in their order; a batch that is small enough and
// of one part is one bucket and is not sorted at all. Then each bucket is a task of its own: a little hash table numbers
// its different keys, and sums are added up in their place in the output.
#include "kvtable/sum_by_key.h"

#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "lookups/distinct_keys.h"
#include "lookups/owners.h"
#include "memory/scratch.h"
#include "threads/task_list.h"
#include "training/add_rows.h"
#include "training/sum_rows.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr int64_t kRange = 16384;         // ids sorted by one task
constexpr int64_t kIdsPerBucket = 65536;  // what sorting spares in cache misses does not pay for it below
constexpr int kMaxBucketBits = 8;
constexpr int64_t kMostBuckets = 1024;  // of all parts, where parts allow

}  // namespace

// The ids of one gradient in order of their bucket, equal buckets in order of the ids.
struct SumByKey::Sorted {
  explicit Sorted(const PooledGradient& g) : gradient(g), bags(*g.bags), n(g.bags->ids()) {
    while (bits < kMaxBucketBits && (n >> bits) > kIdsPerBucket && (g.parts << (bits + 1)) <= kMostBuckets) {
      ++bits;
    }
    buckets = g.parts << bits;
    bucket_begin = {0, static_cast<uint32_t>(n)};
    // Written before they are read: `new` leaves them as they are.
    keys.reset(new uint64_t[static_cast<size_t>(n)]);
    number.reset(new uint32_t[static_cast<size_t>(n)]);
    if (sorted()) {
      begins.resize(static_cast<size_t>(ranges() * buckets));
      bucket_begin.resize(static_cast<size_t>(buckets) + 1);
      bucket_of.reset(new uint32_t[static_cast<size_t>(n)]);
      bag_of.reset(new uint32_t[static_cast<size_t>(n)]);
      if (bags.weights() != nullptr) id.reset(new uint32_t[static_cast<size_t>(n)]);
    }
    unique.resize(static_cast<size_t>(buckets));
    unique_begin.resize(static_cast<size_t>(buckets));
  }

  bool sorted() const { return buckets > 1; }
  int64_t ranges() const { return sorted() ? (n + kRange - 1) / kRange : 0; }  // tasks that sort
  int64_t BucketsPerPart() const { return int64_t{1} << bits; }

  template <class Compute>
  const Compute* divisors() const {
    return own_divisors.empty() ? nullptr : reinterpret_cast<const Compute*>(own_divisors.data());
  }
  void FindDivisors() {
    if (gradient.combiner == Combiner::kSum) return;
    const auto find = [&](auto t) {
      using Compute = decltype(t);
      own_divisors.resize(static_cast<size_t>(bags.size()) * sizeof(Compute));
      Compute* const to = reinterpret_cast<Compute*>(own_divisors.data());
      for (int64_t b = 0; b < bags.size(); ++b) to[b] = bags.Divisor<Compute>(b, gradient.combiner);
    };
    bags.value_type() == ValueType::kFloat64 ? find(double{}) : find(float{});
  }

  void Count(int64_t r) {
    const int64_t first = r * kRange;
    const int64_t last = std::min(n, first + kRange);
    uint32_t* const counts = begins.data() + r * buckets;
    VisitSignedKeyType(bags.key_type(), [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = reinterpret_cast<const Key*>(bags.keys());
      const PartOf<Key> part_of(gradient.parts);
      for (int64_t i = first; i < last; ++i) {
        uint32_t bucket = static_cast<uint32_t>(gradient.parts == 1 ? 0 : part_of(typed[i])) << bits;
        if (bits > 0) bucket |= static_cast<uint32_t>(Mix64(Widen(typed[i])) >> (64 - bits));
        bucket_of[static_cast<size_t>(i)] = bucket;
        ++counts[bucket];
      }
    });
  }

  void PlaceBuckets() {
    if (!sorted()) return;
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
    VisitSignedKeyType(bags.key_type(), [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = reinterpret_cast<const Key*>(bags.keys());
      int64_t bag = 0;
      for (int64_t low = 0, high = bags.size();
           low < high;) {  // the last bag that begins at or before `first`
        const int64_t middle = (low + high) / 2;
        if (bags.begin(middle) <= first) {
          bag = middle;
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      for (int64_t i = first; i < last; ++i) {
        while (i >= bags.end(bag)) ++bag;
        const uint32_t at = next[bucket_of[static_cast<size_t>(i)]]++;
        keys[at] = Widen(typed[i]);
        bag_of[at] = static_cast<uint32_t>(bag);
        if (id != nullptr) id[at] = static_cast<uint32_t>(i);
      }
    });
  }

  // Numbers the different keys of a bucket in order of appearance, and moves them to its beginning.
  void FindUnique(int64_t b) {
    const uint32_t first = bucket_begin[static_cast<size_t>(b)];
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    if (first == last) return;
    const uint64_t* const from = sorted() ? keys.get() + first : WideKeys();
    const uint32_t count = NumberDistinctKeys(from, last - first, keys.get() + first,
                                              [&](uint32_t i, uint32_t n, bool) { number[first + i] = n; });
    unique[static_cast<size_t>(b)] = count;
  }

  void PlaceUnique() {
    for (int64_t part = 0, b = 0; part < gradient.parts; ++part) {
      int64_t total = 0;
      for (int64_t i = 0; i < BucketsPerPart(); ++i, ++b) {
        unique_begin[static_cast<size_t>(b)] = total;
        total += unique[static_cast<size_t>(b)];
      }
      counts.push_back(total);
    }
  }

  void Write(int64_t b, const Share& share) const {
    const int64_t count = unique[static_cast<size_t>(b)];
    if (count == 0) return;
    const int64_t to = unique_begin[static_cast<size_t>(b)];
    WriteKeys(b, share.keys);
    VisitValueType(bags.value_type(), [&](auto t) {
      using T = decltype(t);
      using Compute = ComputeOf<T>;
      const int64_t dim = gradient.dim;
      T* const out = static_cast<T*>(share.rows) + to * dim;
      const size_t elements = static_cast<size_t>(count * dim);
      if constexpr (std::is_same_v<T, Compute>) {
        Sum<T>(b, out);
      } else {
        Scratch<Compute> sums(elements);
        Sum<T>(b, sums.data());
        for (size_t j = 0; j < elements; ++j) out[j] = Element<T>::Store(sums[j]);
      }
    });
  }

  Terms TermsOf(int64_t part) const {
    Terms terms;
    const int64_t first_bucket = part << bits;
    const int64_t last_bucket = first_bucket + BucketsPerPart();
    const size_t ids =
        bucket_begin[static_cast<size_t>(last_bucket)] - bucket_begin[static_cast<size_t>(first_bucket)];
    const size_t count = static_cast<size_t>(counts[static_cast<size_t>(part)]);
    terms.keys.resize(count * static_cast<size_t>(SizeOf(bags.key_type())));
    terms.begins.resize(count + 1);
    terms.bags.resize(ids);
    for (int64_t b = first_bucket; b < last_bucket; ++b) {
      WriteKeys(b, terms.keys.data());
      const int64_t to = unique_begin[static_cast<size_t>(b)];
      EachId(b, [&](uint32_t i, uint32_t, uint32_t) {
        ++terms.begins[static_cast<size_t>(to + number[i]) + 1];
      });
    }
    for (size_t k = 0; k < count; ++k) terms.begins[k + 1] += terms.begins[k];
    const auto place = [&](auto t) {
      using Compute = decltype(t);
      terms.scales.resize(ids * sizeof(Compute));
      Compute* const scales = reinterpret_cast<Compute*>(terms.scales.data());
      const Compute* const weights = static_cast<const Compute*>(bags.weights());
      const Compute* const divisor_of = divisors<Compute>();
      std::vector<uint32_t> next(terms.begins.begin(), terms.begins.end() - 1);
      for (int64_t b = first_bucket; b < last_bucket; ++b) {
        const int64_t to = unique_begin[static_cast<size_t>(b)];
        EachId(b, [&](uint32_t i, uint32_t bag, uint32_t place) {
          const Compute divisor = divisor_of == nullptr ? 1 : divisor_of[bag];
          const uint32_t at = next[static_cast<size_t>(to + number[i])]++;
          terms.bags[at] = divisor == 0 ? Terms::kNothing : bag;
          scales[at] = divisor == 0 ? 0 : (weights == nullptr ? 1 : weights[place]) / divisor;
        });
      }
    };
    bags.value_type() == ValueType::kFloat64 ? place(double{}) : place(float{});
    return terms;
  }

  // Calls body(i, its bag, its place among the bags' ids) for each id of a bucket; the last where there are weights.
  template <class Body>
  void EachId(int64_t b, const Body& body) const {
    if (!sorted()) {
      for (int64_t bag = 0; bag < bags.size(); ++bag) {
        for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
          body(static_cast<uint32_t>(i), static_cast<uint32_t>(bag), static_cast<uint32_t>(i));
        }
      }
      return;
    }
    const uint32_t last = bucket_begin[static_cast<size_t>(b) + 1];
    for (uint32_t i = bucket_begin[static_cast<size_t>(b)]; i < last; ++i) {
      body(i, bag_of[i], id == nullptr ? 0 : id[i]);
    }
  }

  // The different keys of a bucket, where they belong in their part's.
  void WriteKeys(int64_t b, void* keys_out) const {
    const int64_t count = unique[static_cast<size_t>(b)];
    const uint64_t* const found = keys.get() + bucket_begin[static_cast<size_t>(b)];
    VisitKeyType(bags.key_type(), [&](auto k) {
      using Key = decltype(k);
      Key* const out = static_cast<Key*>(keys_out) + unique_begin[static_cast<size_t>(b)];
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Key>(found[i]);
    });
  }

  template <class T>
  void Sum(int64_t b, ComputeOf<T>* sums) const {
    using Compute = ComputeOf<T>;
    const int64_t dim = gradient.dim;
    const T* const rows = static_cast<const T*>(gradient.gradient);
    const Compute* const weights = static_cast<const Compute*>(bags.weights());
    const Compute* const divisor_of = divisors<Compute>();
    const AddToRows add = BestAddToRows(std::is_same_v<Compute, double>);
    std::vector<Compute> scaled(static_cast<size_t>(dim));
    uint32_t begun = 0;  // keys are numbered in the order in which their sums begin
    // Ids one behind the other that are of one bag and weigh the same have the same share of its gradient.
    const auto add_run = [&](uint32_t first, uint32_t end, int64_t bag, Compute weight) {
      const Compute divisor = divisor_of == nullptr ? 1 : divisor_of[bag];
      if (divisor == 0) {  // nothing was pooled, and no gradient counts, finite or not
        for (uint32_t i = first; i < end; ++i) {
          if (number[i] != begun) continue;
          std::fill_n(sums + int64_t{begun} * dim, dim, Compute{0});
          ++begun;
        }
        return;
      }
      StoreScaledRow(rows + bag * dim, weight / divisor, dim, scaled.data());
      add(scaled.data(), number.get() + first, end - first, dim, &begun, sums);
    };
    if (!sorted() && weights == nullptr) {
      for (int64_t bag = 0; bag < bags.size(); ++bag) {
        add_run(static_cast<uint32_t>(bags.begin(bag)), static_cast<uint32_t>(bags.end(bag)), bag, 1);
      }
    } else {
      EachId(b, [&](uint32_t i, uint32_t bag, uint32_t place) {
        add_run(i, i + 1, bag, weights == nullptr ? 1 : weights[place]);
      });
    }
  }

  // All keys in order of the ids.
  const uint64_t* WideKeys() {
    if (bags.key_type() != KeyType::kInt32) return reinterpret_cast<const uint64_t*>(bags.keys());
    const int32_t* const narrow = reinterpret_cast<const int32_t*>(bags.keys());
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = Widen(narrow[i]);
    return keys.get();
  }

  static uint64_t Widen(int32_t key) { return WidenKey(key); }
  static uint64_t Widen(int64_t key) { return static_cast<uint64_t>(key); }
  static uint64_t Widen(uint64_t key) { return key; }

  const PooledGradient& gradient;
  const Bags& bags;
  const int64_t n;
  int bits = 0;  // of a key's hash in the number of its bucket, below its part
  int64_t buckets = 1;
  // Where there are several buckets:
  std::vector<uint32_t> begins;           // (ranges, buckets): where a range's first id of a bucket goes
  std::unique_ptr<uint32_t[]> bucket_of;  // (n) in order of the ids; what follows is sorted
  std::unique_ptr<uint32_t[]> bag_of;     // (n)
  std::unique_ptr<uint32_t[]> id;         // (n), where there are weights

  std::vector<uint32_t> bucket_begin;  // (buckets + 1)
  std::unique_ptr<uint64_t[]> keys;    // (n), later the different keys at the beginning of each bucket
  std::unique_ptr<uint32_t[]> number;  // (n): of the key among its bucket's different keys
  std::vector<uint32_t> unique;        // (buckets): how many different keys
  std::vector<int64_t> unique_begin;   // (buckets): where they go in the part's output
  std::vector<int64_t> counts;         // (parts)
  std::vector<char> own_divisors;      // (bags), or empty: all are 1
};

SumByKey::SumByKey(std::vector<PooledGradient> gradients, ParallelFor& threads)
    : gradients_(std::move(gradients)) {
  TaskList each, by_range, by_bucket;
  for (size_t g = 0; g < gradients_.size(); ++g) {
    sorted_.push_back(std::make_unique<Sorted>(gradients_[g]));
    each.Add(g, 1);
    by_range.Add(g, sorted_[g]->ranges());
    by_bucket.Add(g, sorted_[g]->buckets);
  }
  RunPhases(threads, std::max(by_range.size(), by_bucket.size()),
            by_range.AsPhase([&](size_t g, int64_t r) { sorted_[g]->Count(r); }),
            each.AsPhase([&](size_t g, int64_t) {
              sorted_[g]->PlaceBuckets();
              sorted_[g]->FindDivisors();
            }),
            by_range.AsPhase([&](size_t g, int64_t r) { sorted_[g]->Sort(r); }),
            by_bucket.AsPhase([&](size_t g, int64_t b) { sorted_[g]->FindUnique(b); }));
  for (const auto& sorted : sorted_) sorted->PlaceUnique();
}

SumByKey::~SumByKey() = default;

int64_t SumByKey::count(size_t g, int64_t part) const {
  return sorted_[g]->counts[static_cast<size_t>(part)];
}

void SumByKey::Write(const std::vector<std::vector<Share>>& shares, ParallelFor& threads) const {
  TaskList by_bucket;
  for (size_t g = 0; g < sorted_.size(); ++g) by_bucket.Add(g, sorted_[g]->buckets);
  by_bucket.Run(threads, [&](size_t g, int64_t b) {
    sorted_[g]->Write(b, shares[g][static_cast<size_t>(b >> sorted_[g]->bits)]);
  });
}

SumByKey::Terms SumByKey::TermsOf(size_t g, int64_t part) const { return sorted_[g]->TermsOf(part); }

}  // namespace kvtable
