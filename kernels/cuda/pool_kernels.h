// Kernel bodies of pooled lookups: the rows of a bag of ids are combined as they are read, and never written
// down.
//
// A lane has one element of one pooled row, element first + l of (bags, dim), so lanes beside each other read
// elements beside each other whatever the width of a row, and a bag of any length is summed in the order of
// its ids: the sums are those of the CPU, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "bag_splits.h"
#include "base/host_device.h"
#include "batch_keys.h"
#include "device_rows.h"
#include "find_kernels.h"
#include "kvtable/bags.h"
#include "kvtable/sum_by_key.h"
#include "values/elements.h"

namespace kvtable {

// What a bag's sum is divided by; see Combiner.
template <class C>
KVTABLE_HOST_DEVICE inline C BagDivisor(const C* weights, int64_t begin, int64_t end, Combiner combiner) {
  if (combiner == Combiner::kSum) return 1;
  C total = 0;
  if (weights == nullptr) {
    total = static_cast<C>(end - begin);
  } else {
    for (int64_t i = begin; i < end; ++i) {
      total += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
    }
  }
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// The rows of a pooled lookup's ids, element by element.
template <class T>
struct IdRows {
  BatchKeys keys;
  DeviceRows rows;
  const uint32_t* numbers;  // (ids): the ids' rows
  MissingValue missing;     // for kNoRow

  KVTABLE_HOST_DEVICE T At(int64_t i, uint64_t j) const {
    const uint32_t row = numbers[i];
    if (row != kNoRow) return reinterpret_cast<const T*>(rows.Row(row))[j];
    if (missing.missing == Missing::kZeros) return T{};
    const uint64_t key = keys.At(static_cast<uint64_t>(i));
    const char* const ready = missing.Ready(key, static_cast<uint64_t>(i));
    if (ready != nullptr) return reinterpret_cast<const T*>(ready)[j];
    if (missing.initial.IsPadding(key)) return T{};
    return missing.initial.template Drawn<T>(RandomStream(missing.initial.seed, key), j);
  }
};

template <class T>
struct PoolBody {
  using Compute = typename Element<T>::Compute;

  IdRows<T> rows;
  BagSplits bags;
  const Compute* weights;  // (ids) or null
  Combiner combiner;
  uint64_t dim;
  T* out;  // (bags, dim)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t at = first + lanes.lane();
    if (at >= bags.bags * dim) return;
    const uint64_t bag = at / dim;
    const uint64_t j = at - bag * dim;
    if (j == 0) bags.Check(bag);
    const int64_t begin = bags.Begin(bag);
    const int64_t end = bags.End(bag);
    if (weights == nullptr && end == begin + 1) {  // whatever the combiner
      out[at] = rows.At(begin, j);
      return;
    }
    Compute sum = 0;
    constexpr int kAtOnce = 4;  // loads whose latencies pass at the same time
    int64_t i = begin;
    for (; i + kAtOnce <= end; i += kAtOnce) {
      T elements[kAtOnce];
      KVTABLE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) elements[u] = rows.At(i + u, j);
      KVTABLE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) sum += Weighted(elements[u], i + u);
    }
    for (; i < end; ++i) sum += Weighted(rows.At(i, j), i);
    const Compute divisor = BagDivisor(weights, begin, end, combiner);
    out[at] = Element<T>::Store(divisor == 0 ? Compute{0} : divisor == 1 ? sum : sum / divisor);
  }

 private:
  KVTABLE_HOST_DEVICE Compute Weighted(T element, int64_t i) const {
    const Compute x = Element<T>::Load(element);
    return weights == nullptr ? x : weights[i] * x;
  }
};

// The gradient with respect to each id's row: that of its bag's pooled row, times the id's weight, over the
// divisor.
template <class T>
struct SpreadGradientBody {
  using Compute = typename Element<T>::Compute;

  BagSplits bags;
  const Compute* weights;  // (ids) or null
  Combiner combiner;
  uint64_t dim;
  const T* gradient;  // (bags, dim)
  T* out;             // (ids, dim)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t at = first + lanes.lane();
    if (at >= bags.bags * dim) return;
    const uint64_t bag = at / dim;
    const uint64_t j = at - bag * dim;
    if (j == 0) bags.Check(bag);
    const int64_t begin = bags.Begin(bag);
    const int64_t end = bags.End(bag);
    const Compute of_bag = Element<T>::Load(gradient[at]);
    const Compute divisor = BagDivisor(weights, begin, end, combiner);
    for (int64_t i = begin; i < end; ++i) {
      const Compute weight = weights == nullptr ? Compute{1} : weights[i];
      // Where nothing was pooled no gradient counts, finite or not.
      const Compute x = divisor == 0 ? Compute{0} : weight / divisor * of_bag;
      out[static_cast<uint64_t>(i) * dim + j] = Element<T>::Store(x);
    }
  }
};

// The gradient with respect to the different keys' rows: see SumByKey::Terms. A lane has one element of one
// sum, and adds in the order of the ids.
template <class T>
struct SumRowsBody {
  using Compute = typename Element<T>::Compute;

  const uint32_t* begins;  // (sums + 1)
  const uint32_t* bags;
  const Compute* scales;
  uint64_t sums;
  uint64_t dim;
  const T* rows;  // (bags, dim)
  T* out;         // (sums, dim)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t at = first + lanes.lane();
    if (at >= sums * dim) return;
    const uint64_t k = at / dim;
    const uint64_t j = at - k * dim;
    const uint32_t begin = begins[k];
    Compute sum = 0;
    for (uint32_t i = begin; i < begins[k + 1]; ++i) {
      const uint32_t bag = bags[i];
      const Compute term =
          bag == SumByKey::Terms::kNothing ? 0 : scales[i] * Element<T>::Load(rows[bag * dim + j]);
      sum = i == begin ? term : sum + term;
    }
    out[at] = Element<T>::Store(sum);
  }
};

// The gradient with respect to each id's weight, in lookups with weights. Lane l has id first + l, and all
// lanes sum the products of its row: on a GPU in another order than the CPU.
template <class T>
struct WeightsGradientBody {
  using Compute = typename Element<T>::Compute;

  IdRows<T> rows;
  BagSplits bags;          // at least one
  const Compute* weights;  // (ids)
  Combiner combiner;
  uint64_t dim;
  const T* pooled;    // (bags, dim)
  const T* gradient;  // (bags, dim): with respect to these
  Compute* out;       // (ids)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint64_t bag = i < rows.keys.n ? BagOf(static_cast<int64_t>(i)) : 0;
    Compute of_row = 0;
    Compute of_pooled = 0;
    for (uint32_t owner = 0; owner < Lanes::kCount && first + owner < rows.keys.n; ++owner) {
      const uint64_t at = lanes.From(owner, bag) * dim;
      Compute row = 0;
      Compute along = 0;
      for (uint64_t j = lanes.lane(); j < dim; j += Lanes::kCount) {
        const Compute g = Element<T>::Load(gradient[at + j]);
        row += g * Element<T>::Load(rows.At(static_cast<int64_t>(first + owner), j));
        if (combiner != Combiner::kSum) along += g * Element<T>::Load(pooled[at + j]);
      }
      row = lanes.Sum(row);
      along = lanes.Sum(along);
      if (lanes.lane() != owner) continue;
      of_row = row;
      of_pooled = along;
    }
    if (i >= rows.keys.n) return;
    const Compute divisor = BagDivisor(weights, bags.Begin(bag), bags.End(bag), combiner);
    // The divisor depends on the weight, too: it shrinks what was pooled.
    const Compute share = combiner == Combiner::kSqrtN ? weights[i] / divisor : 1;
    out[i] = divisor == 0 ? Compute{0} : (of_row - share * of_pooled) / divisor;
  }

 private:
  KVTABLE_HOST_DEVICE uint64_t BagOf(int64_t i) const {
    uint64_t low = 0;  // the last bag that begins at i or before
    uint64_t high = bags.bags;
    while (high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      if (bags.splits[middle] <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace kvtable
