// Numbering the different keys among a few thousand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memory/scratch.h"

namespace kvtable {

// Numbers different keys in the order in which they first occur, writes them to `found`, which may be `keys`
// itself, calls visit(i, number of keys[i], whether it is the first of its key), and returns how many there
// are.
template <class Visit>
uint32_t NumberDistinctKeys(const uint64_t* keys, uint32_t n, uint64_t* found, const Visit& visit) {
  int bits = 4;
  while ((size_t{1} << bits) < 2 * size_t{n}) ++bits;
  const size_t mask = (size_t{1} << bits) - 1;
  constexpr uint32_t kFree = UINT32_MAX;
  Scratch<uint32_t> numbers(mask + 1);  // open addressing
  std::memset(numbers.data(), 0xff, (mask + 1) * sizeof(uint32_t));
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t key = keys[i];
    found[count] =
        key;  // keys before i have been read. So a free place holds the key, too, and which of both it is
              // needs no branch, which nobody could foresee.
    size_t at = (key * 0x9e3779b97f4a7c15ULL) >> (64 - bits);
    uint32_t number = numbers[at] == kFree ? count : numbers[at];
    while (found[number] != key) {
      at = (at + 1) & mask;
      number = numbers[at] == kFree ? count : numbers[at];
    }
    const bool first = number == count;
    numbers[at] = number;
    count += first ? 1 : 0;
    visit(i, number, first);
  }
  return count;
}

}  // namespace kvtable
