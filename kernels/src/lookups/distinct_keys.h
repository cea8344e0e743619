// Telling the different keys among a few thousand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "memory/scratch.h"

namespace kvtable {

// As NumberDistinctKeys, of fewer keys than the most that Number holds. The table has four places for each, so that few
// keys meet: one that does is a branch that nobody could foresee, which costs more than the cache that is spared.
template <class Number, class Visit>
uint32_t NumberKeys(const uint64_t* keys, uint32_t n, uint64_t* found, const Visit& visit) {
  int bits = 4;
  while ((size_t{1} << bits) < 4 * size_t{n}) ++bits;
  const size_t mask = (size_t{1} << bits) - 1;
  Scratch<Number> numbers(mask + 1);  // open addressing
  std::memset(numbers.data(), 0xff, (mask + 1) * sizeof(Number));
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t key = keys[i];
    // Keys before i have been read. So a free place holds the key, too: which of both it is needs no branch, and
    // nobody could foresee that.
    found[count] = key;
    size_t at = (key * 0x9e3779b97f4a7c15ULL) >> (64 - bits);
    uint32_t number = std::min<uint32_t>(numbers[at], count);
    while (found[number] != key) {
      at = (at + 1) & mask;
      number = std::min<uint32_t>(numbers[at], count);
    }
    const bool first = number == count;
    numbers[at] = static_cast<Number>(number);
    count += first ? 1 : 0;
    visit(i, number, first);
  }
  return count;
}

// Numbers different keys in the order in which they first occur, writes them to `found`, which may be `keys`
// itself, calls visit(i, number of keys[i], whether it is the first of its key), and returns how many there
// are.
template <class Visit>
uint32_t NumberDistinctKeys(const uint64_t* keys, uint32_t n, uint64_t* found, const Visit& visit) {
  return n < UINT16_MAX ? NumberKeys<uint16_t>(keys, n, found, visit)
                        : NumberKeys<uint32_t>(keys, n, found, visit);
}

// Orders keys by which one they are. `order` (n) gets 0 to n - 1: equal keys next to each other, as they come in the
// batch, and different ones as each comes first. Those of different key u begin at begins[u], and begins[distinct] is n;
// `begins` has room for n + 2. Returns how many different keys there are.
//
// Most keys of most batches come once. So keys first mark bits, in an array that stays in the first-level cache and
// is filled to a sixteenth: no branch to foresee, and no key to compare. Those that share a bit, a few of a hundred
// where all keys are different, are then told apart by a hash table. A batch that repeats itself goes there at once.
inline uint32_t OrderByKey(const uint64_t* keys, uint32_t n, uint32_t* order, uint32_t* begins) {
  int bits = 10;
  while ((size_t{1} << bits) < 16 * size_t{n}) ++bits;
  const size_t words = size_t{1} << (bits - 6);
  const auto mark_of = [bits](uint64_t key) { return (key * 0x9e3779b97f4a7c15ULL) >> (64 - bits); };
  Scratch<uint64_t> marks(words);
  Scratch<uint32_t> shared(n);
  std::memset(marks.data(), 0, words * sizeof(uint64_t));
  constexpr uint32_t kBlock = 1024;
  uint32_t meetings = 0;
  uint32_t begin = 0;
  for (; begin < n && meetings <= begin / 8; begin += kBlock) {
    const uint32_t end = std::min(n, begin + kBlock);
    for (uint32_t i = begin; i < end; ++i) {
      const uint64_t mark = mark_of(keys[i]);
      uint64_t& word = marks[mark / 64];
      shared[meetings] = i;
      meetings += word >> (mark % 64) & 1;
      word |= uint64_t{1} << (mark % 64);
    }
  }
  const bool repeats = begin < n || meetings > n / 8;
  if (repeats) {
    Scratch<uint64_t> found(n);
    Scratch<uint32_t> numbers(n);
    std::fill_n(begins, n + 2, 0);
    const uint32_t distinct =
        NumberDistinctKeys(keys, n, found.data(), [&](uint32_t i, uint32_t number, bool) {
          numbers[i] = number;
          ++begins[number + 2];
        });
    for (uint32_t u = 0; u < distinct; ++u) begins[u + 2] += begins[u + 1];
    for (uint32_t i = 0; i < n; ++i) order[begins[numbers[i] + 1]++] = i;
    return distinct;
  }
  const auto all_differ = [=] {
    std::iota(order, order + n, 0);
    std::iota(begins, begins + n + 1, 0);
    return n;
  };
  if (meetings == 0) return all_differ();
  std::memset(marks.data(), 0, words * sizeof(uint64_t));
  for (uint32_t m = 0; m < meetings; ++m) {
    const uint64_t mark = mark_of(keys[shared[m]]);
    marks[mark / 64] |= uint64_t{1} << (mark % 64);
  }
  uint32_t candidates = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t mark = mark_of(keys[i]);
    shared[candidates] = i;
    candidates += marks[mark / 64] >> (mark % 64) & 1;
  }
  // Of those, the occurrences of each key are chained.
  constexpr uint32_t kNoMore = UINT32_MAX;
  Scratch<uint64_t> found(candidates);
  Scratch<uint32_t> last(candidates);
  Scratch<uint32_t> again(size_t{candidates} + 1);  // keys that have come before
  Scratch<uint32_t> next(n);
  std::fill_n(next.data(), n, kNoMore);
  for (uint32_t c = 0; c < candidates; ++c) found[c] = keys[shared[c]];
  uint32_t repeated = 0;
  NumberDistinctKeys(found.data(), candidates, found.data(), [&](uint32_t c, uint32_t number, bool is_first) {
    const uint32_t i = shared[c];
    if (!is_first) {
      next[last[number]] = i;
      again[repeated++] = i;
    }
    last[number] = i;
  });
  if (repeated == 0) return all_differ();
  again[repeated] = n;
  uint32_t distinct = 0;
  uint32_t to = 0;
  uint32_t skipped = 0;
  for (uint32_t i = 0; i < n; ++i) {
    if (i == again[skipped]) {
      ++skipped;
      continue;
    }
    begins[distinct++] = to;
    for (uint32_t j = i; j != kNoMore; j = next[j]) order[to++] = j;
  }
  begins[distinct] = n;
  return distinct;
}

}  // namespace kvtable
