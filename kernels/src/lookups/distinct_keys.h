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

// What ends the occurrences of a key.
inline constexpr uint32_t kNoMore = UINT32_MAX;

// Chains equal keys: `first` gets the first occurrence of each different key, in order, and next[i] the one of key i
// after i, or kNoMore. Both have room for n. Returns how many different keys there are.
//
// Most keys of most batches come once. So keys first mark bits, in an array that stays in the first-level cache and
// is filled to a sixteenth: no branch to foresee, and no key to compare. Those that share a bit, a few of a hundred
// where all keys are different, are then told apart by a hash table. A batch that repeats itself goes there at once.
inline uint32_t ChainEqualKeys(const uint64_t* keys, uint32_t n, uint32_t* first, uint32_t* next) {
  std::fill_n(next, n, kNoMore);
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
  if (meetings == 0) {
    std::iota(first, first + n, 0);
    return n;
  }
  if (repeats) {
    Scratch<uint64_t> found(n);
    Scratch<uint32_t> numbers(n);
    const uint32_t distinct = NumberDistinctKeys(
        keys, n, found.data(), [&](uint32_t i, uint32_t number, bool) { numbers[i] = number; });
    // From the last to the first, so that no key has to be asked whether it is one.
    std::fill_n(first, distinct, kNoMore);
    for (uint32_t i = n; i-- > 0;) {
      uint32_t& head = first[numbers[i]];
      next[i] = head;
      head = i;
    }
    return distinct;
  }
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
  Scratch<uint64_t> found(candidates);
  Scratch<uint32_t> last(candidates);
  for (uint32_t c = 0; c < candidates; ++c) found[c] = keys[shared[c]];
  uint32_t distinct = 0;
  uint32_t done = 0;  // keys before it are in `first`, or come again
  NumberDistinctKeys(found.data(), candidates, found.data(), [&](uint32_t c, uint32_t number, bool is_first) {
    const uint32_t i = shared[c];
    if (!is_first) {
      next[last[number]] = i;
      for (; done < i; ++done) first[distinct++] = done;
      done = i + 1;
    }
    last[number] = i;
  });
  for (; done < n; ++done) first[distinct++] = done;
  return distinct;
}

}  // namespace kvtable
