// Kernel bodies that update rows by an optimizer's rule: the rule's own source, the one that CPUs run. A tile
// of lanes (row_lanes.h) updates a row, and sums its gradients on the way.
//
// UpdateHeldBody has the row's elements in registers, as what the rule computes in: a rule that does not
// couple elements goes over the row piece by piece, one that does needs the row to fit.
// UpdateInMemoryBody is for coupling rules and rows of any width: it updates rows where they lie or, in
// 16-bit tables, a copy in working memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"
#include "batch_gradients.h"
#include "batch_keys.h"
#include "device_rows.h"
#include "kvtable/table.h"
#include "optimizers/rule.h"
#include "row_lanes.h"
#include "values/elements.h"
#include "values/random.h"
#include "values/stochastic_rounding.h"
#include "zero_mark_kernels.h"

namespace kvtable {

struct RowsToUpdate {
  static constexpr size_t kMostColumns = 8;

  BatchGradients batch;
  BatchKeys keys;                 // without any, a row's place is its key
  const bool* skipped = nullptr;  // (n) by position, or null
  DeviceRows rows;
  // Not null: rows are not a table's, but those of arrays, of which this is the first. They have no stamps, and
  // `offsets` lead from it to the others.
  char* arrays = nullptr;
  int64_t offsets[kMostColumns] = {};  // of the value and the rule's slots in a row
  double decay = 0;                    // learning rate * weight decay
  bool stochastic_rounding = false;
  uint64_t seed = 0;
  DeviceZeroMarks zero_marks;
  Stamp stamp;

  // Whether a row is to be updated whose occurrences are found at position s.
  KVTABLE_HOST_DEVICE bool Updates(uint64_t s, const BatchGradients::Run& run) const {
    return run.begins && run.row != kNoRow && (skipped == nullptr || !skipped[s]);
  }

  KVTABLE_HOST_DEVICE PlacedRow Placed(uint32_t row) const {
    return arrays == nullptr ? rows.At(row) : PlacedRow{arrays + int64_t{row} * rows.row_bytes, nullptr};
  }

  // The random bits of the row's stochastic rounding: those of the CPU (optimizer.cc).
  KVTABLE_HOST_DEVICE uint64_t RandomBitsOf(const BatchGradients::Run& run) const {
    if (!stochastic_rounding) return 0;
    return RandomStream(Mix64(seed), ~(keys.keys == nullptr ? run.first_place : keys.At(run.first_place)));
  }

  // Writes element j of column c.
  template <class T>
  KVTABLE_HOST_DEVICE void Store(typename Element<T>::Compute x, uint64_t random, size_t c, int64_t j,
                                 T* column) const {
    if constexpr (!std::is_same_v<T, typename Element<T>::Compute>) {
      if (stochastic_rounding) {
        const int64_t words = (batch.dim + 1) / 2;  // of a column
        const uint64_t word =
            RandomWord(random, static_cast<uint64_t>(static_cast<int64_t>(c) * words + j / 2));
        column[j] = StoreStochastically<T>(x, static_cast<uint32_t>(word >> (j % 2 * 32)));
        return;
      }
    }
    column[j] = Element<T>::Store(x);
  }

  // What is left when a row's elements are written. One lane.
  KVTABLE_HOST_DEVICE void Finish(uint32_t row, uint32_t frequency, bool zeroed, DeviceStamp* at) const {
    zero_marks.Set(row, zeroed);
    if (at == nullptr) return;
    const uint32_t room = UINT32_MAX - frequency;
    *at = {frequency + (stamp.frequency < room ? stamp.frequency : room), stamp.version};
  }
};

template <class Rule, class T, int kHeld>
struct UpdateHeldBody {
  using C = typename Element<T>::Compute;
  static constexpr size_t kColumns = 1 + Rule::kSlots.size();

  RowsToUpdate rows;
  typename Rule::template Constants<C> constants;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    using Tile = RowTile<Lanes>;
    const Tile tile(lanes);
    const uint64_t s = (first + lanes.lane()) / Tile::kCount;
    if (s >= rows.batch.n) return;
    const BatchGradients::Run run = rows.batch.RunAt(s);
    if (!rows.Updates(s, run)) return;
    const PlacedRow placed = rows.Placed(run.row);
    char* const row = placed.row;
    // Loaded while the row is.
    const uint32_t frequency = tile.lane() == 0 && placed.stamp != nullptr ? placed.stamp->frequency : 0;
    const uint64_t random = rows.RandomBitsOf(run);
    const int64_t dim = rows.batch.dim;
    bool zeroed = false;
    for (int64_t begin = 0; begin < dim; begin += int64_t{Tile::kCount} * kHeld) {
      const int64_t mine = begin + tile.lane();
      C held[kColumns][kHeld];
      C* columns[kColumns];
      KVTABLE_UNROLL
      for (size_t c = 0; c < kColumns; ++c) {
        const T* const column = reinterpret_cast<const T*>(row + rows.offsets[c]);
        columns[c] = held[c];
        KVTABLE_UNROLL
        for (int j = 0; j < kHeld; ++j) {
          const int64_t at = mine + int64_t{Tile::kCount} * j;
          held[c][j] = at < dim ? Element<T>::Load(column[at]) : C{0};
        }
      }
      C gradient[kHeld];
      rows.batch.template Sum<T>(s, run, mine, Tile::kCount, gradient);
      if (!kDecaysItself<Rule, C> && rows.decay != 0) {
        const C decay = static_cast<C>(rows.decay);
        KVTABLE_UNROLL
        for (int j = 0; j < kHeld; ++j) held[0][j] -= held[0][j] * decay;
      }
      if constexpr (kCouplesElements<Rule>) {
        zeroed = Rule::template Update<C>(constants, HeldRow<Tile, kHeld>{dim, tile}, columns, gradient);
      } else {
        zeroed = Rule::template Update<C>(constants, HeldPiece<kHeld>{}, columns, gradient);
      }
      KVTABLE_UNROLL
      for (size_t c = 0; c < kColumns; ++c) {
        T* const column = reinterpret_cast<T*>(row + rows.offsets[c]);
        KVTABLE_UNROLL
        for (int j = 0; j < kHeld; ++j) {
          const int64_t at = mine + int64_t{Tile::kCount} * j;
          if (at < dim) rows.template Store<T>(held[c][j], random, c, at, column);
        }
      }
    }
    if (tile.lane() == 0) rows.Finish(run.row, frequency, zeroed, placed.stamp);
  }
};

template <class Rule, class T>
struct UpdateInMemoryBody {
  using C = typename Element<T>::Compute;
  static constexpr bool kConverts = !std::is_same_v<T, C>;
  static constexpr size_t kColumns = 1 + Rule::kSlots.size();

  RowsToUpdate rows;
  typename Rule::template Constants<C> constants;
  uint64_t tiles;  // each updates every so many-th row
  C* working;      // (tiles, WorkingElements)

  // For a tile: the summed gradient and, where they are of another type, the row's columns.
  static constexpr int64_t WorkingElements(int64_t dim) {
    return dim * (1 + (kConverts ? static_cast<int64_t>(kColumns) : 0));
  }

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    using Tile = RowTile<Lanes>;
    const Tile tile(lanes);
    const uint64_t number = (first + lanes.lane()) / Tile::kCount;
    if (number >= tiles) return;
    const int64_t dim = rows.batch.dim;
    C* const gradient =
        working + number * static_cast<uint64_t>(dim * (1 + (kConverts ? int64_t{kColumns} : 0)));
    for (uint64_t s = number; s < rows.batch.n; s += tiles) {
      const BatchGradients::Run run = rows.batch.RunAt(s);
      if (rows.Updates(s, run)) UpdateRow(tile, s, run, gradient);
    }
  }

 private:
  template <class Tile>
  KVTABLE_HOST_DEVICE void UpdateRow(const Tile& tile, uint64_t s, const BatchGradients::Run& run,
                                     C* gradient) const {
    const int64_t dim = rows.batch.dim;
    const auto elements = RowInMemory(tile, dim);
    const PlacedRow placed = rows.Placed(run.row);
    char* const row = placed.row;
    C* columns[kColumns];
    for (size_t c = 0; c < kColumns; ++c) {
      T* const column = reinterpret_cast<T*>(row + rows.offsets[c]);
      if constexpr (kConverts) {
        columns[c] = gradient + dim * static_cast<int64_t>(c + 1);
        for (int64_t j = elements.begin(); j < elements.end(); j += elements.step()) {
          columns[c][j] = Element<T>::Load(column[j]);
        }
      } else {
        columns[c] = column;
      }
    }
    for (int64_t j = elements.begin(); j < elements.end(); j += elements.step()) {
      C sum[1];
      rows.batch.template Sum<T>(s, run, j, 0, sum);
      gradient[j] = sum[0];
    }
    if (!kDecaysItself<Rule, C> && rows.decay != 0) {
      const C decay = static_cast<C>(rows.decay);
      C* const w = columns[0];
      for (int64_t j = elements.begin(); j < elements.end(); j += elements.step()) w[j] -= w[j] * decay;
    }
    const bool zeroed = Rule::template Update<C>(constants, elements, columns, gradient);
    if constexpr (kConverts) {
      const uint64_t random = rows.RandomBitsOf(run);
      for (size_t c = 0; c < kColumns; ++c) {
        T* const column = reinterpret_cast<T*>(row + rows.offsets[c]);
        for (int64_t j = elements.begin(); j < elements.end(); j += elements.step()) {
          rows.template Store<T>(columns[c][j], random, c, j, column);
        }
      }
    }
    if (tile.lane() != 0) return;
    rows.Finish(run.row, placed.stamp == nullptr ? 0 : placed.stamp->frequency, zeroed, placed.stamp);
  }
};

}  // namespace kvtable
