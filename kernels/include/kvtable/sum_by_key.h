// The gradient of pooled lookups with respect to rows: one row for each key that was looked up, summed
// straight from the gradient of the pooled rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/bags.h"
#include "kvtable/parallel_for.h"

namespace kvtable {

struct PooledGradient {
  const Bags* bags;
  Combiner combiner;
  int64_t parts;
  int64_t dim;
  const void* gradient;  // (bags, dim) of the bags' value type
};

// Each part's keys come once, in an order that depends on the keys alone; a key's sum is taken in the order
// of its ids (in float for 16-bit values), whatever the number of threads.
class SumByKey {
 public:
  struct Share {
    void* keys;  // (count)
    void* rows;  // (count, dim)
  };

  // Finds the keys. The inputs stay the caller's.
  SumByKey(std::vector<PooledGradient> gradients, ParallelFor& threads);
  ~SumByKey();
  SumByKey(const SumByKey&) = delete;
  SumByKey& operator=(const SumByKey&) = delete;

  // How many different keys of gradient g belong to a part.
  int64_t count(size_t g, int64_t part) const;

  // Writes keys and sums: shares[g][part].
  void Write(const std::vector<std::vector<Share>>& shares, ParallelFor& threads) const;

  // What is to be summed, for whoever sums elsewhere: key k of a part is the sum of scales[i] x the gradient
  // of bag bags[i], for i in [begins[k], begins[k + 1]) and in this order; kNothing is a bag that adds
  // nothing. Writes no sums.
  struct Terms {
    static constexpr uint32_t kNothing = UINT32_MAX;
    std::vector<char> keys;        // (count) of the key type
    std::vector<uint32_t> begins;  // (count + 1)
    std::vector<uint32_t> bags;    // (ids of the part)
    std::vector<char> scales;      // (ids of the part): double for rows of double, else float
  };
  Terms TermsOf(size_t g, int64_t part) const;

 private:
  struct Sorted;
  std::vector<PooledGradient> gradients_;
  std::vector<std::unique_ptr<Sorted>> sorted_;  // of each gradient
};

}  // namespace kvtable
