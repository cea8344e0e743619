#include "kvtable/placed_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "lookups/bag_sums.h"
#include "lookups/pool_bags.h"
#include "memory/copy_rows.h"
#include "threads/run_tasks.h"
#include "training/add_rows.h"
#include "values/elements.h"
#include "values/row_conversion.h"

namespace kvtable {
namespace {

constexpr int64_t kRowsAhead = 8;
constexpr int64_t kRowsAtOnce = 512;

[[noreturn]] void ThrowOutside(int64_t place, int64_t dim, int64_t elements) {
  throw Error(ErrorCode::kInvalidArgument, "a row of " + std::to_string(dim) +
                                               " elements is to lie at element " + std::to_string(place) +
                                               " of a buffer of " + std::to_string(elements) + ".");
}

void CheckNarrows(ValueType wide, ValueType narrow) {
  if (wide == ValueType::kFloat32 && (narrow == ValueType::kFloat16 || narrow == ValueType::kBFloat16))
    return;
  throw Error(ErrorCode::kInvalidArgument,
              "Only float32 rows are put into a buffer of another type, a 16-bit one.");
}

inline void CheckPlace(int64_t place, int64_t dim, int64_t elements) {
  if (place < 0 || place > elements - dim) ThrowOutside(place, dim, elements);
}

// Where the places of a buffer in pieces are.
class PlacesInPieces {
 public:
  explicit PlacesInPieces(const PlacedRows& rows) : size_(SizeOf(rows.type)) {
    for (const PlacedRows::Piece& piece : rows.pieces) {
      if (piece.elements == 0) continue;
      pieces_.push_back({end_, end_ + piece.elements, static_cast<const char*>(piece.data)});
      end_ += piece.elements;
    }
    if (pieces_.empty()) pieces_.push_back({0, 0, nullptr});
  }

  const char* Row(int64_t place, int64_t dim) const {
    const Piece& piece = PieceOf(place);
    if (place < piece.begin || place > piece.end - dim) ThrowOutside(place, dim, end_);
    return piece.data + (place - piece.begin) * size_;
  }

  // The same where any place may be asked for, to no more than a prefetch.
  const char* Hint(int64_t place) const {
    const Piece& piece = PieceOf(place);
    return piece.data + (place - piece.begin) * size_;
  }

  int64_t element_bytes() const { return size_; }

 private:
  struct Piece {
    int64_t begin;
    int64_t end;
    const char* data;
  };

  // There are as many as ranks of a machine: few. Which one it is no processor foresees, so that it is counted.
  const Piece& PieceOf(int64_t place) const {
    size_t number = 0;
    for (size_t p = 1; p < pieces_.size(); ++p) number += place >= pieces_[p].begin;
    return pieces_[number];
  }

  const int64_t size_;
  int64_t end_ = 0;
  std::vector<Piece> pieces_;  // in order, none empty; at least one
};

// Rows of T, which lie in a buffer of T's own type, or a 16-bit one.
template <class T>
class RowsAtPlaces {
 public:
  RowsAtPlaces(const Bags& bags, int64_t dim, const PlacedRows& rows, int64_t end)
      : places_(reinterpret_cast<const int64_t*>(bags.keys())), rows_(rows), dim_(dim), end_(end) {
    if (rows.type == bags.value_type()) return;
    CheckNarrows(bags.value_type(), rows.type);
    load_ = BestRowConversion(rows.type).load;
    row_.resize(static_cast<size_t>(dim));
  }

  const T* Row(int64_t i) {
    next_ = i + 1;
    if (i + kRowsAhead < end_) {
      PrefetchRow<kAnyBytes>(rows_.Hint(places_[i + kRowsAhead]), dim_ * rows_.element_bytes());
    }
    const char* const row = rows_.Row(places_[i], dim_);
    if constexpr (std::is_same_v<T, float>) {
      if (load_ != nullptr) {
        load_(row, dim_, row_.data());
        return row_.data();
      }
    }
    return reinterpret_cast<const T*>(row);
  }
  int64_t block_end() const { return next_; }

 private:
  const int64_t* const places_;
  const PlacesInPieces rows_;
  const int64_t dim_;
  const int64_t end_;
  void (*load_)(const void* from, int64_t n, float* to) = nullptr;
  std::vector<float> row_;  // where `load_` puts it
  int64_t next_ = 0;
};

// Bags [first, last).
void PoolRange(const PlacedPool& pool, const PlacedRows& rows, int64_t first, int64_t last) {
  const Bags& bags = *pool.bags;
  const int64_t* const places = reinterpret_cast<const int64_t*>(bags.keys());
  const PlacesInPieces found(rows);
  BagSums sums(bags, rows.type, pool.combiner, pool.dim, first, last, pool.pooled);
  const char* block[kRowsAtOnce];
  const int64_t end = bags.begin(last);
  for (int64_t i = bags.begin(first); i < end;) {
    const int64_t n = std::min(kRowsAtOnce, end - i);
    for (int64_t b = 0; b < n; ++b) block[b] = found.Row(places[i + b], pool.dim);
    sums.Add(block, n);
    i += n;
  }
  sums.Finish();
}

// Adds the gradient of each id whose place is in [low, high) to that place of `sums`.
template <class T>
void AddRange(const PlacedGradient& g, ComputeOf<T>* sums, int64_t elements, int64_t low, int64_t high) {
  using Compute = ComputeOf<T>;
  const Bags& bags = *g.bags;
  const int64_t* const places = reinterpret_cast<const int64_t*>(bags.keys());
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  const AddToPlaces add = BestAddToPlaces(std::is_same_v<Compute, double>);
  const int64_t end = bags.begin(bags.size());
  std::vector<Compute> scaled(static_cast<size_t>(g.dim));
  std::vector<int64_t> mine;
  for (int64_t bag = 0; bag < bags.size(); ++bag) {
    const Compute divisor = bags.Divisor<Compute>(bag, g.combiner);
    if (divisor == 0) continue;  // nothing was pooled, and no gradient counts, finite or not
    const T* const gradient = static_cast<const T*>(g.gradient) + bag * g.dim;
    mine.clear();
    for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      const int64_t place = places[i];
      CheckPlace(place, g.dim, elements);
      if (i + kRowsAhead < end) {
        PrefetchRow<kAnyBytes>(reinterpret_cast<const char*>(sums + places[i + kRowsAhead]),
                               g.dim * int64_t{sizeof(Compute)});
      }
      if (place < low || place >= high) continue;
      if (weights == nullptr) {
        mine.push_back(place);
      } else {
        AddScaledRow(gradient, weights[i] / divisor, g.dim, sums + place);
      }
    }
    if (mine.empty()) continue;
    StoreScaledRow(gradient, 1 / divisor, g.dim, scaled.data());
    add(scaled.data(), mine.data(), static_cast<int64_t>(mine.size()), g.dim, sums);
  }
}

}  // namespace

void PoolPlaced(const std::vector<PlacedPool>& pools, const PlacedRows& rows, ParallelFor& threads) {
  for (const PlacedPool& pool : pools) {
    if (rows.type != pool.bags->value_type()) CheckNarrows(pool.bags->value_type(), rows.type);
  }
  ForBagRanges(
      pools, threads, [](const auto&) { return true; },
      [&](const PlacedPool& pool, int64_t first, int64_t last) { PoolRange(pool, rows, first, last); });
}

void FindPlacedWeightsGradient(const std::vector<PlacedWeightsGradient>& pools, const PlacedRows& rows,
                               ParallelFor& threads) {
  ForBagRanges(
      pools, threads, [](const auto&) { return true; },
      [&](const PlacedWeightsGradient& pool, int64_t first, int64_t last) {
        VisitValueType(pool.bags->value_type(), [&](auto t) {
          using T = decltype(t);
          RowsAtPlaces<T> found(*pool.bags, pool.dim, rows, pool.bags->begin(last));
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
  const ValueType given = gradients.empty() ? type : gradients[0].bags->value_type();
  if (given != type) CheckNarrows(given, type);
  VisitValueType(given, [&](auto t) {
    using T = decltype(t);
    using Compute = ComputeOf<T>;
    const bool narrow = SizeOf(type) < static_cast<int64_t>(sizeof(Compute));
    std::unique_ptr<Compute[]> wide;
    Compute* sums;
    if (narrow) {
      wide.reset(new Compute[static_cast<size_t>(elements)]);
      sums = wide.get();
    } else {
      sums = static_cast<Compute*>(rows);
    }
    const Ranges ranges(elements, kLeastElements, threads);
    // The pieces of a gradient are the rows in a range of the buffer: each looks at all ids.
    TaskList tasks;
    std::vector<int64_t> pieces;
    for (size_t g = 0; g < gradients.size(); ++g) {
      pieces.push_back(
          std::max<int64_t>(1, std::min<int64_t>(threads.threads(), gradients[g].bags->ids() / kLeastIds)));
      tasks.Add(g, pieces.back());
    }
    const auto of_ranges = [&] { return ranges.count(); };
    const Phase zero{of_ranges,
                     [&](int64_t r) { std::fill(sums + ranges.begin(r), sums + ranges.end(r), Compute{0}); }};
    const auto add = tasks.AsPhase([&](size_t g, int64_t piece) {
      AddRange<T>(gradients[g], sums, elements, elements * piece / pieces[g],
                  elements * (piece + 1) / pieces[g]);
    });
    const int64_t most = std::max(ranges.count(), tasks.size());
    if constexpr (std::is_same_v<Compute, float>) {
      if (narrow) {
        const auto store = BestRowConversion(type).store;
        char* const out = static_cast<char*>(rows);
        const Phase narrow_down{of_ranges, [&](int64_t r) {
                                  store(sums + ranges.begin(r), ranges.end(r) - ranges.begin(r),
                                        out + ranges.begin(r) * SizeOf(type));
                                }};
        RunPhases(threads, most, zero, add, narrow_down);
        return;
      }
    }
    RunPhases(threads, most, zero, add);
  });
}

}  // namespace kvtable
