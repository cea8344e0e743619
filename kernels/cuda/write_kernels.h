// Kernel bodies that write rows whose numbers are known.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atomics.h"
#include "base/host_device.h"
#include "batch_claims.h"
#include "copy_rows.h"
#include "device_rows.h"
#include "kvtable/table.h"
#include "values/elements.h"

namespace kvtable {

// Notes which occurrence of each row in the batch counts.
struct ClaimBody {
  BatchClaims claims;
  const uint32_t* numbers;  // (n)
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    // In each warp, and as far as it can be over all, the place that counts comes first: most of the others of a row
    // that occurs often have nothing to do then.
    const uint64_t at = first + lanes.lane();
    const uint64_t i = claims.first ? at : n - 1 - at;
    const uint32_t row = at < n ? numbers[i] : kNoRow;
    const bool comes_first = (lanes.Same(row) & ((1u << lanes.lane()) - 1)) == 0;
    if (row != kNoRow && comes_first) claims.Claim(row, static_cast<uint32_t>(i));
  }
};

// Writes a column, of equal keys' values the one that counts.
struct AssignBody {
  DeviceRows rows;
  BatchClaims claims;
  const uint32_t* numbers;  // (n)
  const bool* only;         // (n) or null: the occurrences whose rows are written
  uint64_t n;
  int64_t offset;  // of the column in a row
  int64_t bytes;
  int alignment;
  const char* in;  // (n, width of column)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    char* to = nullptr;
    const char* from = nullptr;
    if (i < n && (only == nullptr || only[i]) && claims.Counts(numbers[i], static_cast<uint32_t>(i))) {
      to = rows.Row(numbers[i]) + offset;
      from = in + i * static_cast<uint64_t>(bytes);
    }
    CopyRows(lanes, to, from, bytes, alignment);
  }
};

// Sets both stamps, of equal keys' stamps those that count. Null pointers stand for zeros.
struct AssignStampsBody {
  DeviceRows rows;
  BatchClaims claims;
  const uint32_t* numbers;   // (n)
  const uint32_t* freqs;     // (n)
  const uint32_t* versions;  // (n)
  uint32_t latest;           // version; no row gets a later one
  uint32_t without;          // `versions`: what rows get
  uint64_t n;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || !claims.Counts(numbers[i], static_cast<uint32_t>(i))) return;
    uint32_t version = without;
    if (versions != nullptr) version = versions[i] < latest ? versions[i] : latest;
    *rows.StampOf(numbers[i]) = {freqs == nullptr ? 0 : freqs[i], version};
  }
};

// Stamps each occurrence's row; kNoRow is left out.
struct StampBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  const bool* only;         // (n) or null: the occurrences that count
  uint64_t n;
  Stamp stamp;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t number = i < n && (only == nullptr || only[i]) ? numbers[i] : kNoRow;
    // One lane stamps for all that have its row.
    const uint32_t same = lanes.Same(number);
    if (number == kNoRow || (same & ((1u << lanes.lane()) - 1)) != 0) return;
    DeviceStamp* const row = rows.StampOf(number);
    const uint64_t by = uint64_t{stamp.frequency} * CountBits(same);
    if (by != 0) {
      if (LoadRelaxed(&row->frequency) + uint64_t{stamp.frequency} * n <= UINT32_MAX) {
        FetchAdd(&row->frequency, static_cast<uint32_t>(by));  // whatever the others of the batch add
      } else {
        // It ends at the largest number, and never wraps: what others read meanwhile is true.
        const uint32_t most = by < UINT32_MAX ? static_cast<uint32_t>(by) : UINT32_MAX;
        uint32_t seen = LoadRelaxed(&row->frequency);
        while (!ReplaceRelaxed(&row->frequency, &seen, seen > UINT32_MAX - most ? UINT32_MAX : seen + most)) {
        }
      }
    }
    if (LoadRelaxed(&row->version) != stamp.version) StoreRelaxed(&row->version, stamp.version);
  }
};

// Adds to the frequencies of rows, each occurrence what it says; kNoRow is left out.
struct IncreaseFrequencyBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  const uint32_t* by;  // (n)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    if (i >= n || numbers[i] == kNoRow || by[i] == 0) return;
    DeviceStamp* const row = rows.StampOf(numbers[i]);
    const uint32_t before = FetchAdd(&row->frequency, by[i]);
    if (before > UINT32_MAX - by[i]) StoreRelaxed(&row->frequency, UINT32_MAX);
  }
};

// *p += delta in one step. A GPU has an instruction for it for the wide types, which many threads with the
// same key do not hold up for long (it takes subnormal floats for zeros); the others try until nobody else
// was faster.
template <class T>
KVTABLE_HOST_DEVICE inline void AddToElement(T* p, T delta) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_floating_point_v<T>) {
    atomicAdd(p, delta);
    return;
  } else if constexpr (std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>) {
    using Word = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned>;
    atomicAdd(reinterpret_cast<Word*>(p), static_cast<Word>(delta));
    return;
  }
#endif
  ChangeElement(p, [delta](T x) { return AddElements<T>(x, delta); });
}

// value += delta for each occurrence, in no particular order: sums of three and more floats may differ in
// their last bits from one run to the next.
template <class T>
struct AccumulateBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  int64_t dim;
  const T* deltas;  // (n, dim)

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t mine = i < n ? numbers[i] : kNoRow;
    const uint64_t total = static_cast<uint64_t>(dim) * Lanes::kCount;
    for (uint64_t begin = 0; begin < total; begin += Lanes::kCount) {
      const uint64_t at = begin + lanes.lane();
      const uint32_t owner = static_cast<uint32_t>(at / static_cast<uint64_t>(dim));
      const uint32_t row = lanes.From(owner, mine);
      if (row == kNoRow) continue;
      const uint64_t j = at - static_cast<uint64_t>(owner) * static_cast<uint64_t>(dim);
      const T delta = deltas[(first + owner) * static_cast<uint64_t>(dim) + j];
      AddToElement(reinterpret_cast<T*>(rows.Row(row)) + j, delta);
    }
  }
};

// value = value op operand for each occurrence, in no particular order.
template <class T>
struct CombineBody {
  DeviceRows rows;
  const uint32_t* numbers;  // (n)
  uint64_t n;
  int64_t dim;
  const T* operands;  // (n, dim)
  RowOp op;

  template <class Lanes>
  KVTABLE_HOST_DEVICE void operator()(const Lanes& lanes, uint64_t first) const {
    const uint64_t i = first + lanes.lane();
    const uint32_t mine = i < n ? numbers[i] : kNoRow;
    const uint64_t total = static_cast<uint64_t>(dim) * Lanes::kCount;
    for (uint64_t begin = 0; begin < total; begin += Lanes::kCount) {
      const uint64_t at = begin + lanes.lane();
      const uint32_t owner = static_cast<uint32_t>(at / static_cast<uint64_t>(dim));
      const uint32_t row = lanes.From(owner, mine);
      if (row == kNoRow) continue;
      const uint64_t j = at - static_cast<uint64_t>(owner) * static_cast<uint64_t>(dim);
      const T operand = operands[(first + owner) * static_cast<uint64_t>(dim) + j];
      const RowOp combine = op;
      ChangeElement(reinterpret_cast<T*>(rows.Row(row)) + j,
                    [combine, operand](T x) { return CombineElements<T>(combine, x, operand); });
    }
  }
};

}  // namespace kvtable
