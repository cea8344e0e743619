// The gradients of a batch, the occurrences of each row side by side: how they are summed, once for each row,
// in the order of the batch.
//
// A row that occurs thousands of times would keep one tile busy long after all others have ended. So where
// several tiles work at once, positions are cut into chunks, and chunks that are of one row as a whole are summed
// before, each by a tile of its own (SumChunksBody). A row's sum is then that of its first occurrences, of the
// chunks' sums and of its last occurrences, in this order: the same from run to run, though not the order in which a
// CPU adds.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "values/elements.h"

namespace kvtable {

// A position s stands for one occurrence of a row in the batch; positions of equal rows adjoin, in the order
// of the batch.
struct BatchGradients {
  const uint32_t* row_of = nullptr;    // (n); null: position s is row s
  const uint32_t* place_of = nullptr;  // (n) in the batch; null: position s is place s, and all rows differ
  uint64_t n = 0;
  const void* gradients = nullptr;  // (n, dim) in the order of the batch
  int64_t dim = 0;
  const void* chunk_sums =
      nullptr;         // (chunks(), dim) in what is computed in, of whole chunks; null: there are none
  int chunk_bits = 0;  // log2 of a chunk's positions

  // Of a row that begins at a position, where its occurrences end, and the place in the batch of the first; of others,
  // `begins` is false.
  struct Run {
    uint32_t row;
    bool begins;
    uint64_t first_place;
    uint64_t end;
  };

  KVTABLE_HOST_DEVICE uint64_t PlaceOf(uint64_t s) const { return place_of == nullptr ? s : place_of[s]; }
  KVTABLE_HOST_DEVICE uint64_t chunks() const { return n >> chunk_bits; }

  // s < n.
  KVTABLE_HOST_DEVICE Run RunAt(uint64_t s) const {
    if (place_of == nullptr)
      return {row_of == nullptr ? static_cast<uint32_t>(s) : row_of[s], true, s, s + 1};
    // Loads that do not wait for one another.
    const uint32_t row = row_of[s];
    const uint32_t before = row_of[s > 0 ? s - 1 : s];
    const uint32_t after = row_of[s + 1 < n ? s + 1 : s];
    const uint64_t place = place_of[s];
    const bool begins = s == 0 || before != row;
    const bool ends = s + 1 == n || after != row;
    return {row, begins, place, begins && !ends ? EndOf(s) : s + 1};
  }

  // Whether all positions of a chunk are of one row.
  KVTABLE_HOST_DEVICE bool IsWhole(uint64_t chunk) const {
    return row_of[chunk << chunk_bits] == row_of[((chunk + 1) << chunk_bits) - 1];
  }

  // Sums the elements first, first + stride, ... of the occurrences; zeros where there is no such element.
  template <class T, int kHeld>
  KVTABLE_HOST_DEVICE void Sum(uint64_t s, const Run& run, int64_t first, int64_t stride,
                               typename Element<T>::Compute (&sum)[kHeld]) const {
    using C = typename Element<T>::Compute;
    const bool cut = chunk_sums != nullptr;
    uint64_t chunk =
        cut ? (s + (uint64_t{1} << chunk_bits) - 1) >> chunk_bits : 0;  // that begins here, or next
    const uint64_t end_chunk = cut ? run.end >> chunk_bits : 0;
    const bool has_whole = chunk < end_chunk;
    const C* const sums = static_cast<const C*>(chunk_sums);
    if (has_whole && chunk << chunk_bits == s) {
      Load<C, C>(sums, chunk++, first, stride, sum);
    } else {
      Load<T, C>(static_cast<const T*>(gradients), run.first_place, first, stride, sum);
      Add<T>(s + 1, has_whole ? chunk << chunk_bits : run.end, first, stride, sum);
    }
    if (!has_whole) return;
    AddRows<4, C, C>(sums, chunk, end_chunk, first, stride, sum, [](uint64_t at) { return at; });
    Add<T>(end_chunk << chunk_bits, run.end, first, stride, sum);
  }

  // The sum of a chunk that is whole.
  template <class T, int kHeld>
  KVTABLE_HOST_DEVICE void SumChunk(uint64_t chunk, int64_t first, int64_t stride,
                                    typename Element<T>::Compute (&sum)[kHeld]) const {
    const uint64_t begin = chunk << chunk_bits;
    Load<T, typename Element<T>::Compute>(static_cast<const T*>(gradients), place_of[begin], first, stride,
                                          sum);
    Add<T, 8>(begin + 1, begin + (uint64_t{1} << chunk_bits), first, stride, sum);
  }

 private:
  // Where the occurrences end that begin at s, with at least two: in steps that double, and back in halves.
  KVTABLE_HOST_DEVICE uint64_t EndOf(uint64_t s) const {
    const uint32_t row = row_of[s];
    uint64_t step = 1;
    while (s + 2 * step < n && row_of[s + 2 * step] == row) step *= 2;
    uint64_t last = s + step;  // is the row's
    uint64_t end = s + 2 * step < n ? s + 2 * step : n;
    while (end - last > 1) {
      const uint64_t middle = last + (end - last) / 2;
      if (row_of[middle] == row) {
        last = middle;
      } else {
        end = middle;
      }
    }
    return end;
  }

  template <class From, class C, int kHeld>
  KVTABLE_HOST_DEVICE void Load(const From* all, uint64_t at, int64_t first, int64_t stride,
                                C (&to)[kHeld]) const {
    const From* const here = all + at * static_cast<uint64_t>(dim);
    KVTABLE_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      to[j] = first + j * stride < dim ? Element<From>::Load(here[first + j * stride]) : C{0};
    }
  }

  // Adds the gradients at positions [begin, end), kAtOnce of which are loaded at once.
  template <class T, int kAtOnce = 4, int kHeld>
  KVTABLE_HOST_DEVICE void Add(uint64_t begin, uint64_t end, int64_t first, int64_t stride,
                               typename Element<T>::Compute (&sum)[kHeld]) const {
    AddRows<kAtOnce, T, typename Element<T>::Compute>(
        static_cast<const T*>(gradients), begin, end, first, stride, sum,
        [this](uint64_t at) -> uint64_t { return place_of[at]; });
  }

  // Adds the rows row_at(begin), ..., in order.
  template <int kAtOnce, class From, class C, int kHeld, class RowAt>
  KVTABLE_HOST_DEVICE void AddRows(const From* all, uint64_t begin, uint64_t end, int64_t first,
                                   int64_t stride, C (&sum)[kHeld], const RowAt& row_at) const {
    uint64_t at = begin;
    for (; at + kAtOnce <= end; at += kAtOnce) {
      uint64_t rows[kAtOnce];
      C loaded[kAtOnce][kHeld];
      KVTABLE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) rows[u] = row_at(at + static_cast<uint64_t>(u));
      KVTABLE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) Load<From, C>(all, rows[u], first, stride, loaded[u]);
      KVTABLE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        KVTABLE_UNROLL
        for (int j = 0; j < kHeld; ++j) sum[j] += loaded[u][j];
      }
    }
    for (; at < end; ++at) {
      C loaded[kHeld];
      Load<From, C>(all, row_at(at), first, stride, loaded);
      KVTABLE_UNROLL
      for (int j = 0; j < kHeld; ++j) sum[j] += loaded[j];
    }
  }
};

}  // namespace kvtable
