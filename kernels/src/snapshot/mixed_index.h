// Sorted mixed keys with a directory, and how a group of keys is found in them: in a file, or in memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "base/hash.h"
#include "snapshot/format.h"

namespace kvtable {

inline constexpr int kGroup = 64;  // keys that are looked up side by side
inline constexpr int64_t kLine = 64;
// Of a row: the processor fetches the rest of a longer one by itself.
inline constexpr int64_t kLinesAhead = 8;

inline void Prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

inline void PrefetchRow(const uint8_t* row, int64_t bytes) {
  const int64_t lines = std::min(kLinesAhead, (bytes + kLine - 1) / kLine);
  for (int64_t line = 0; line < lines; ++line) Prefetch(row + line * kLine);
  Prefetch(row + bytes - 1);
}

// Lets the disk begin with what will be read: a group's pages come side by side, and not one fault after the
// other.
inline void AskFor(const void* address, int64_t bytes) {
  static const auto kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(address) & ~(kPage - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(bytes);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

// The keys of one table, and where each is.
template <class Entry>
struct MixedIndex {
  const Entry* directory;  // (buckets + 1)
  const uint64_t* keys;    // (rows), rising
  uint64_t buckets;
  int64_t rows;

  // What is in a file need not make sense: a start is one of the rows, whatever it says.
  int64_t Start(uint64_t bucket) const {
    return static_cast<int64_t>(std::min<uint64_t>(directory[bucket], static_cast<uint64_t>(rows)));
  }

  // The row of a mixed key that is in `bucket`, which begins at `start`; -1 if there is none.
  int64_t Find(uint64_t mixed, uint64_t bucket, int64_t start) const {
    // All keys behind a bucket are larger than those in it, so there is no need to see where it ends. A bucket
    // has 4 keys on average and seldom more than 8.
    if (start + 8 <= rows) {
      const uint64_t* const at = keys + start;
      int64_t smaller = 0;
      for (int i = 0; i < 8; ++i) smaller += at[i] < mixed;
      if (smaller < 8) return at[smaller] == mixed ? start + smaller : -1;
      start += 8;
    }
    const int64_t end = Start(bucket + 1);
    if (start >= end) return -1;
    const uint64_t* const found = std::lower_bound(keys + start, keys + end, mixed);
    return found != keys + end && *found == mixed ? found - keys : -1;
  }

  // Rows of `n` keys, at most kGroup. With `ask`, pages are asked for ahead.
  void FindGroup(const int64_t* of, int n, bool ask, int64_t* found) const {
    uint64_t mixed[kGroup];
    uint64_t bucket[kGroup];
    int64_t start[kGroup];
    for (int i = 0; i < n; ++i) {
      mixed[i] = Mix64(static_cast<uint64_t>(of[i]));
      bucket[i] = snapshot_format::BucketOfMixed(mixed[i], buckets);
      Prefetch(directory + bucket[i]);
    }
    for (int i = 0; ask && i < n; ++i) AskFor(directory + bucket[i], 2 * int64_t{sizeof(Entry)});
    for (int i = 0; i < n; ++i) {
      start[i] = Start(bucket[i]);
      Prefetch(keys + start[i]);
      Prefetch(keys + start[i] + 7);
    }
    for (int i = 0; ask && i < n; ++i) AskFor(keys + start[i], 8 * int64_t{sizeof(uint64_t)});
    for (int i = 0; i < n; ++i) found[i] = Find(mixed[i], bucket[i], start[i]);
  }
};

}  // namespace kvtable
