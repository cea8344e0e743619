// A radix sort in place, a byte at a time from the highest on ("American flag sort", McIlroy, Bostic and
// McIlroy, Engineering Radix Sort, 1993). Mixed keys are spread evenly, so few bytes are looked at before the
// pieces are small; equal keys go on to the end of the bytes and are sorted by row.
#include "snapshot/key_sorter.h"

#include <algorithm>
#include <utility>

namespace kvtable {
namespace {

constexpr int kDigits = 256;
constexpr int64_t kSmall = 64;

bool Before(const MixedKey& a, const MixedKey& b) {
  return a.mixed != b.mixed ? a.mixed < b.mixed : a.row < b.row;
}

// Splits by the byte at `shift`: digit d becomes [ends[d - 1], ends[d]).
void Split(MixedKey* keys, int64_t n, int shift, int64_t (&ends)[kDigits]) {
  int64_t heads[kDigits] = {};
  const auto digit = [shift](const MixedKey& key) { return static_cast<uint8_t>(key.mixed >> shift); };
  for (int64_t i = 0; i < n; ++i) ++heads[digit(keys[i])];
  int64_t sum = 0;
  for (int d = 0; d < kDigits; ++d) {
    sum += heads[d];
    ends[d] = sum;
    heads[d] = sum - heads[d];
  }
  for (int d = 0; d < kDigits; ++d) {
    while (heads[d] < ends[d]) {
      MixedKey key = keys[heads[d]];
      int to = digit(key);
      while (to != d) {
        std::swap(key, keys[heads[to]++]);
        to = digit(key);
      }
      keys[heads[d]++] = key;
    }
  }
}

void SortFrom(MixedKey* keys, int64_t n, int shift) {
  if (n <= kSmall || shift < 0) {
    std::sort(keys, keys + n, Before);
    return;
  }
  int64_t ends[kDigits];
  Split(keys, n, shift, ends);
  for (int d = 0; d < kDigits; ++d) {
    const int64_t begin = d == 0 ? 0 : ends[d - 1];
    if (ends[d] - begin > 1) SortFrom(keys + begin, ends[d] - begin, shift - 8);
  }
}

}  // namespace

void SortMixedKeys(MixedKey* keys, int64_t n, ParallelFor& threads) {
  if (n <= kSmall) {
    SortFrom(keys, n, 56);
    return;
  }
  int64_t ends[kDigits];
  Split(keys, n, 56, ends);
  threads.Run(kDigits, [&](int64_t d) {
    const int64_t begin = d == 0 ? 0 : ends[d - 1];
    SortFrom(keys + begin, ends[d] - begin, 48);
  });
}

}  // namespace kvtable
