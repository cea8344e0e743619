#include "kvtable/placed_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "lookups/pool_bags.h"
#include "memory/copy_rows.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr int64_t kRowsAhead = 8;

[[noreturn]] void ThrowOutside(int64_t place, int64_t dim, int64_t elements) {
  throw Error(ErrorCode::kInvalidArgument, "a row of " + std::to_string(dim) +
                                               " elements is to lie at element " + std::to_string(place) +
                                               " of a buffer of " + std::to_string(elements) + ".");
}

inline void CheckPlace(int64_t place, int64_t dim, int64_t elements) {
  if (place < 0 || place > elements - dim) ThrowOutside(place, dim, elements);
}

template <class T>
class RowsAtPlaces {
 public:
  RowsAtPlaces(const Bags& bags, int64_t dim, const void* rows, int64_t elements, int64_t end)
      : places_(reinterpret_cast<const int64_t*>(bags.keys())),
        rows_(static_cast<const T*>(rows)),
        dim_(dim),
        elements_(elements),
        end_(end) {}

  const T* Row(int64_t i) {
    next_ = i + 1;
    CheckPlace(places_[i], dim_, elements_);
    if (i + kRowsAhead < end_) {
      PrefetchRow<kAnyBytes>(reinterpret_cast<const char*>(rows_ + places_[i + kRowsAhead]),
                             dim_ * int64_t{sizeof(T)});
    }
    return rows_ + places_[i];
  }
  int64_t block_end() const { return next_; }

 private:
  const int64_t* const places_;
  const T* const rows_;
  const int64_t dim_;
  const int64_t elements_;
  const int64_t end_;
  int64_t next_ = 0;
};

// Adds the gradient of each id whose place is in [low, high) to that place of `sums`.
template <class T>
void AddRange(const PlacedGradient& g, ComputeOf<T>* sums, int64_t elements, int64_t low, int64_t high) {
  using Compute = ComputeOf<T>;
  const Bags& bags = *g.bags;
  const int64_t* const places = reinterpret_cast<const int64_t*>(bags.keys());
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  for (int64_t bag = 0; bag < bags.size(); ++bag) {
    const Compute divisor = bags.Divisor<Compute>(bag, g.combiner);
    if (divisor == 0) continue;  // nothing was pooled, and no gradient counts, finite or not
    const T* const gradient = static_cast<const T*>(g.gradient) + bag * g.dim;
    for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      const int64_t place = places[i];
      CheckPlace(place, g.dim, elements);
      if (place < low || place >= high) continue;
      AddScaledRow(gradient, (weights == nullptr ? 1 : weights[i]) / divisor, g.dim, sums + place);
    }
  }
}

}  // namespace

void PoolPlaced(const std::vector<PlacedPool>& pools, const void* rows, int64_t elements,
                ParallelFor& threads) {
  ForBagRanges(
      pools, threads, [](const auto&) { return true; },
      [&](const PlacedPool& pool, int64_t first, int64_t last) {
        VisitValueType(pool.bags->value_type(), [&](auto t) {
          using T = decltype(t);
          RowsAtPlaces<T> found(*pool.bags, pool.dim, rows, elements, pool.bags->begin(last));
          PoolBags(*pool.bags, pool.combiner, pool.dim, first, last, found, static_cast<T*>(pool.pooled));
        });
      });
}

void FindPlacedWeightsGradient(const std::vector<PlacedWeightsGradient>& pools, const void* rows,
                               int64_t elements, ParallelFor& threads) {
  ForBagRanges(
      pools, threads, [](const auto&) { return true; },
      [&](const PlacedWeightsGradient& pool, int64_t first, int64_t last) {
        VisitValueType(pool.bags->value_type(), [&](auto t) {
          using T = decltype(t);
          RowsAtPlaces<T> found(*pool.bags, pool.dim, rows, elements, pool.bags->begin(last));
          FindWeightsGradient(*pool.bags, pool.combiner, pool.dim, first, last, found,
                              static_cast<const T*>(pool.pooled), static_cast<const T*>(pool.gradient),
                              static_cast<ComputeOf<T>*>(pool.weights));
        });
      });
}

void SumPlaced(const std::vector<PlacedGradient>& gradients, ValueType type, void* rows, int64_t elements,
               ParallelFor& threads) {
  constexpr int64_t kLeastElements = 65536;
  constexpr int64_t kLeastIds = 8192;
  VisitValueType(type, [&](auto t) {
    using T = decltype(t);
    using Compute = ComputeOf<T>;
    std::unique_ptr<Compute[]> wide;
    Compute* sums;
    if constexpr (std::is_same_v<T, Compute>) {
      sums = static_cast<T*>(rows);
    } else {
      wide.reset(new Compute[static_cast<size_t>(elements)]);
      sums = wide.get();
    }
    const Ranges ranges(elements, kLeastElements, threads);
    RunTasks(threads, ranges.count(),
             [&](int64_t r) { std::fill(sums + ranges.begin(r), sums + ranges.end(r), Compute{0}); });
    // The pieces of a gradient are the rows in a range of the buffer: each looks at all ids.
    TaskList tasks;
    std::vector<int64_t> pieces;
    for (size_t g = 0; g < gradients.size(); ++g) {
      pieces.push_back(
          std::max<int64_t>(1, std::min<int64_t>(threads.threads(), gradients[g].bags->ids() / kLeastIds)));
      tasks.Add(g, pieces.back());
    }
    tasks.Run(threads, [&](size_t g, int64_t piece) {
      AddRange<T>(gradients[g], sums, elements, elements * piece / pieces[g],
                  elements * (piece + 1) / pieces[g]);
    });
    if constexpr (!std::is_same_v<T, Compute>) {
      T* const out = static_cast<T*>(rows);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        for (int64_t i = ranges.begin(r); i < ranges.end(r); ++i) out[i] = Element<T>::Store(sums[i]);
      });
    }
  });
}

}  // namespace kvtable
