// Kernel bodies that see to a batch of gradients before rows are updated by it.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/host_device.h"
#include "batch_gradients.h"
#include "batch_keys.h"
#include "device_index.h"
#include "device_rows.h"
#include "erase_kernels.h"
#include "row_lanes.h"

namespace kvtable {

// 0, 1, 2, ...
struct PlacesBody {
  uint32_t* places;  // (n)
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n) places[i] = static_cast<uint32_t>(i);
  }
};

// Sums the chunks that are of one row as a whole. A tile of lanes has a chunk.
template <class T>
struct SumChunksBody {
  using C = typename Element<T>::Compute;

  BatchGradients batch;
  C* sums;  // (chunks, dim)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    using Tile = RowTile<Lanes>;
    const Tile tile(lanes);
    const uint64_t chunk = (first + lanes.lane()) / Tile::kCount;
    if (chunk >= batch.chunks() || !batch.IsWhole(chunk)) return;
    for (int64_t j = tile.lane(); j < batch.dim; j += Tile::kCount) {
      C sum[1];
      batch.SumChunk<T>(chunk, j, 0, sum);
      sums[static_cast<int64_t>(chunk) * batch.dim + j] = sum[0];
    }
  }
};

// Notes the rows whose summed gradient has a NaN or an infinity. A tile of lanes has a position.
template <class T>
struct CheckGradientsBody {
  BatchGradients batch;
  bool* skipped;    // (n): true at the first position of such a row, false everywhere else
  uint64_t* count;  // of such rows

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    using C = typename Element<T>::Compute;
    using Tile = RowTile<Lanes>;
    const Tile tile(lanes);
    const uint64_t s = (first + lanes.lane()) / Tile::kCount;
    C wrong = 0;  // NaN where an element is one, or infinite
    if (s < batch.n) {
      const BatchGradients::Run run = batch.RunAt(s);
      for (int64_t j = run.begins && run.row != kNoRow ? tile.lane() : batch.dim; j < batch.dim;
           j += Tile::kCount) {
        C sum[1];
        batch.Sum<T>(s, run, j, 0, sum);
        wrong += sum[0] * C{0};
      }
    }
    if constexpr (Tile::kCount > 1) wrong = tile.Sum(wrong);
    if (tile.lane() != 0 || s >= batch.n) return;
    const bool skips = !(wrong == C{0});
    skipped[s] = skips;
    if (skips) FetchAdd(count, uint64_t{1});
  }
};

// Takes back the rows that this batch inserted and does not update.
struct EraseSkippedBody {
  BatchKeys keys;
  BatchGradients batch;
  const bool* skipped;   // (n) by position
  const bool* inserted;  // (n) by place in the batch
  DeviceIndex index;
  DeviceRows rows;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t s = first + lanes.lane();
    uint32_t row = kNoRow;
    uint64_t key = 0;
    if (s < batch.n && skipped[s] && inserted[batch.PlaceOf(s)]) {
      key = keys.At(batch.PlaceOf(s));
      row = index.Erase(key);
    }
    GiveBack(lanes, rows, row, key);
  }
};

}  // namespace kvtable
