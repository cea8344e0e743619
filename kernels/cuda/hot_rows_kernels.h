// Kernel bodies that let hot rows in host memory change places with cold rows in device memory: where a row
// is hotter the later its version is and, of one version, the higher its frequency.
//
// A turn looks at a window of the index: a random sample of the keys, for that is what neighbours in a hash
// table are. Of a window's rows, as many as lie in host memory are to lie there, the coldest. So the row that
// is to be the hottest of these is found (as shrink_kernels.h finds the last row to go), and every row in
// host memory that is hotter is swapped with one in device memory that is not. There are as many of these,
// and no pair is ever swapped back before it is touched again. Where no more than so many rows may move, the
// hottest go up, and the coldest down.
//
// Row numbers below a bound are in device memory, all others are not. What a key's row holds goes to its new
// number, and the index says so.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "copy_rows.h"
#include "device_index.h"
#include "device_rows.h"
#include "score_kernels.h"
#include "shrink_kernels.h"
#include "zero_mark_kernels.h"

namespace kvtable {

// The n-th lowest of some rows' stamps, being found digit by digit.
struct StampRank {
  static constexpr int kDigits = 8;  // of 8 bits
  static constexpr int kDigitValues = 256;

  uint64_t stamps;  // the digits found so far, zeros below
  uint32_t left;    // the how many-th it is of the rows with these digits
  uint32_t counts[kDigitValues];
};

struct HotRows {
  enum : int { kOfAll, kOfHost, kOfDevice, kRanks };

  StampRank ranks[kRanks];
  uint32_t on_host;  // rows of the window
  uint32_t in_device;
  uint32_t hot;  // rows that were listed
  uint32_t cold;

  KVTABLE_HOST_DEVICE bool HasBoth() const { return on_host != 0 && in_device != 0; }
};

// Buckets from `begin` on, and on from the start of the index.
struct IndexWindow {
  DeviceIndex index;
  uint64_t begin;
  uint64_t count;

  KVTABLE_HOST_DEVICE uint64_t At(uint64_t i) const {
    const uint64_t b = begin + i;
    return b < index.num_buckets ? b : b - index.num_buckets;
  }
};

// Calls visit(row, its stamps, slot) for the window's bucket i, with kNoRow where there is none. All lanes
// take part.
template <class Visit>
KVTABLE_HOST_DEVICE inline void VisitStamps(const IndexWindow& window, const DeviceRows& rows, uint64_t i,
                                            const Visit& visit) {
  const bool is_there = i < window.count;
  const uint64_t at = is_there ? window.At(i) : 0;
  for (int s = 0; s < DeviceBucket::kKeys; ++s) {
    uint32_t row = kNoRow;
    uint64_t stamps = 0;
    if (is_there && (window.index.buckets[at].meta >> s & 1) != 0) {
      row = window.index.buckets[at].rows[s];
      stamps = StampsWord(*rows.StampOf(row), ShrinkOrder::kOldest);
    }
    visit(row, stamps, at * 8 + static_cast<uint64_t>(s));
  }
}

// Lane l has the window's bucket first + l.
struct CountPlacesBody {
  IndexWindow window;
  DeviceRows rows;
  uint32_t device_rows;  // rows below are in device memory
  HotRows* state;        // zeros at first

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    VisitStamps(window, rows, first + lanes.lane(), [&](uint32_t row, uint64_t, Slot) {
      lanes.Count(row != kNoRow && row >= device_rows, &state->on_host);
      lanes.Count(row < device_rows, &state->in_device);
    });
  }
};

// One lane.
struct BeginRanksBody {
  uint32_t most;  // rows to move
  HotRows* state;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0 || !state->HasBoth()) return;
    const uint32_t up = most < state->on_host ? most : state->on_host;
    state->ranks[HotRows::kOfAll].left = state->on_host;
    state->ranks[HotRows::kOfHost].left = state->on_host - up + 1;
    state->ranks[HotRows::kOfDevice].left = most < state->in_device ? most : state->in_device;
  }
};

// Lane l has the window's bucket first + l.
struct CountStampDigitBody {
  IndexWindow window;
  DeviceRows rows;
  uint32_t device_rows;
  int digit;  // counted from the highest
  HotRows* state;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (!state->HasBoth()) return;
    const int shift = 56 - digit * 8;
    const uint64_t above = shift == 56 ? 0 : ~uint64_t{0} << (shift + 8);
    VisitStamps(window, rows, first + lanes.lane(), [&](uint32_t row, uint64_t stamps, Slot) {
      const bool of_rank[] = {row != kNoRow, row != kNoRow && row >= device_rows, row < device_rows};
      for (int r = 0; r < HotRows::kRanks; ++r) {
        StampRank& rank = state->ranks[r];
        lanes.CountEach(of_rank[r] && (stamps & above) == (rank.stamps & above),
                        static_cast<uint32_t>(stamps >> shift & 0xff), rank.counts);
      }
    });
  }
};

// One lane.
struct PickStampDigitBody {
  int digit;
  HotRows* state;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t) const {
    if (lanes.lane() != 0 || !state->HasBoth()) return;
    for (StampRank& rank : state->ranks) {
      uint32_t value = 0;
      while (rank.counts[value] < rank.left) rank.left -= rank.counts[value++];
      rank.stamps |= static_cast<uint64_t>(value) << (56 - digit * 8);
      for (uint32_t& count : rank.counts) count = 0;
    }
  }
};

// Lists where the index has the rows that are to move: in a launch those beyond the bounds, and in another,
// as far as there is room, those on them. Lane l has the window's bucket first + l.
struct ListMovingBody {
  IndexWindow window;
  DeviceRows rows;
  uint32_t device_rows;
  bool on_bounds;
  uint32_t most;
  HotRows* state;
  Slot* hot;   // (most)
  Slot* cold;  // (most)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    if (!state->HasBoth()) return;
    const uint64_t middle = state->ranks[HotRows::kOfAll].stamps;
    const uint64_t of_host = state->ranks[HotRows::kOfHost].stamps;
    const uint64_t of_device = state->ranks[HotRows::kOfDevice].stamps;
    const uint64_t most_cold = middle < of_device ? middle : of_device;
    VisitStamps(window, rows, first + lanes.lane(), [&](uint32_t row, uint64_t stamps, Slot slot) {
      const bool goes_up = row != kNoRow && row >= device_rows && stamps > middle &&
                           (on_bounds ? stamps == of_host : stamps > of_host);
      const bool goes_down = row < device_rows && (on_bounds ? stamps == most_cold : stamps < most_cold);
      const uint32_t up = lanes.Count(goes_up, &state->hot);
      if (goes_up && up < most) hot[up] = slot;
      const uint32_t down = lanes.Count(goes_down, &state->cold);
      if (goes_down && down < most) cold[down] = slot;
    });
  }
};

// Swaps `bytes` bytes at each lane's `a` with those at its `b`, where these are not null; as CopyRows.
template <class Chunk, class Lanes>
KVTABLE_HOST_DEVICE inline void SwapChunks(const Lanes& lanes, char* a, char* b, uint32_t chunks) {
  constexpr uint32_t kAtOnce = 4;
  const uint64_t total = uint64_t{chunks} * Lanes::kCount;
  for (uint64_t begin = 0; begin < total; begin += kAtOnce * Lanes::kCount) {
    Chunk of_a[kAtOnce];
    Chunk of_b[kAtOnce];
    Chunk* at_a[kAtOnce];
    Chunk* at_b[kAtOnce];
    KVTABLE_UNROLL
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      const uint64_t at = begin + u * Lanes::kCount + lanes.lane();
      const uint32_t owner = at < total ? static_cast<uint32_t>(at / chunks) : 0;
      const uint32_t chunk = static_cast<uint32_t>(at - uint64_t{owner} * chunks);
      Chunk* const row_a = reinterpret_cast<Chunk*>(lanes.From(owner, a));
      Chunk* const row_b = reinterpret_cast<Chunk*>(lanes.From(owner, b));
      const bool is_there = at < total && row_a != nullptr;
      at_a[u] = is_there ? row_a + chunk : nullptr;
      at_b[u] = is_there ? row_b + chunk : nullptr;
      of_a[u] = is_there ? *at_a[u] : Chunk{};
      of_b[u] = is_there ? *at_b[u] : Chunk{};
    }
    KVTABLE_UNROLL
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      if (at_a[u] == nullptr) continue;
      *at_a[u] = of_b[u];
      *at_b[u] = of_a[u];
    }
  }
}

template <class Lanes>
KVTABLE_HOST_DEVICE inline void SwapRows(const Lanes& lanes, char* a, char* b, int64_t bytes, int alignment) {
  const uint32_t chunks = static_cast<uint32_t>(bytes >> alignment);
  switch (alignment) {
    case 4:
      return SwapChunks<Chunk16>(lanes, a, b, chunks);
    case 3:
      return SwapChunks<uint64_t>(lanes, a, b, chunks);
    case 2:
      return SwapChunks<uint32_t>(lanes, a, b, chunks);
    case 1:
      return SwapChunks<uint16_t>(lanes, a, b, chunks);
    default:
      return SwapChunks<uint8_t>(lanes, a, b, chunks);
  }
}

// Lane l has the pair first + l.
struct SwapRowsBody {
  DeviceIndex index;
  DeviceRows rows;
  DeviceZeroMarks marks;
  RankedRowsView ranked;  // of a bounded table
  uint32_t most;
  const HotRows* state;
  const Slot* hot;
  const Slot* cold;
  int alignment;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    uint32_t pairs = state->hot < state->cold ? state->hot : state->cold;
    if (pairs > most) pairs = most;
    if (first >= pairs) return;
    const uint64_t i = first + lanes.lane();
    char* up = nullptr;
    char* down = nullptr;
    uint32_t from = kNoRow;
    uint32_t to = kNoRow;
    if (i < pairs) {
      uint32_t* const of_hot = &index.buckets[hot[i] / 8].rows[hot[i] % 8];
      uint32_t* const of_cold = &index.buckets[cold[i] / 8].rows[cold[i] % 8];
      from = *of_hot;
      to = *of_cold;
      *of_hot = to;
      *of_cold = from;
      const DeviceStamp stamp = *rows.StampOf(from);
      *rows.StampOf(from) = *rows.StampOf(to);
      *rows.StampOf(to) = stamp;
      const bool zeroed = marks.Has(from);
      marks.Set(from, marks.Has(to));
      marks.Set(to, zeroed);
      rows.changes.Swap(from, to);
      up = rows.Row(from);
      down = rows.Row(to);
    }
    SwapRows(lanes, up, down, rows.row_bytes, alignment);
    ranked.Swap(lanes, i < pairs, from, to);
  }
};

// Whether each key has a row in device memory.
struct InDeviceBody {
  const uint32_t* numbers;  // (n)
  uint64_t n;
  uint32_t device_rows;
  bool* out;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i < n) out[i] = numbers[i] < device_rows;
  }
};

}  // namespace kvtable
