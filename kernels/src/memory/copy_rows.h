// Copying one row of a known or unknown number of bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/always_inline.h"
#include "memory/prefetch.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvtable {

inline constexpr int64_t kAnyBytes = 0;

// Copies `bytes` bytes; kBytes is the same number where it is known when compiling, else kAnyBytes.
template <int64_t kBytes>
inline void CopyRow(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  if constexpr (kBytes != kAnyBytes) {
    static_assert(kBytes % 16 == 0);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBytes; i += 16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(kBytes != kAnyBytes ? kBytes : bytes));
}

// Asks for the cache lines of a row, up to a few KiB; from there on the hardware's own prefetcher has taken
// over. To be read, lines are brought to the second-level cache only: on the way to the first they would wait
// in its miss buffers, of which a core has 10 to 16, a row of 512 bytes takes 8, and the copy needs some too.
template <int64_t kBytes, bool kForWrite = false>
KVTABLE_ALWAYS_INLINE inline void PrefetchRow(const char* row, int64_t bytes) {
  constexpr int64_t kMostBytes = 2048;
  constexpr int kSecondLevel = 2;
  const int64_t size = kBytes != kAnyBytes ? kBytes : bytes < kMostBytes ? bytes : kMostBytes;
  const auto ask = [](const char* line) KVTABLE_ALWAYS_INLINE {
    kForWrite ? PrefetchToWrite(line) : __builtin_prefetch(line, 0, kSecondLevel);
  };
  for (int64_t i = 0; i < size; i += 64) ask(row + i);
  ask(row + size - 1);
}

// Calls visit(std::integral_constant<int64_t, N>{}) with N = bytes for common sizes, else kAnyBytes. Rows from
// 256 bytes on are left to the C library's copy, which has the widest registers of the CPU at hand: with fewer
// stores to a line, more lines wait in the store buffer for their turn.
template <class Visit>
decltype(auto) VisitRowBytes(int64_t bytes, const Visit& visit) {
  switch (bytes) {
    case 32:
      return visit(std::integral_constant<int64_t, 32>{});
    case 64:
      return visit(std::integral_constant<int64_t, 64>{});
    case 128:
      return visit(std::integral_constant<int64_t, 128>{});
    default:
      return visit(std::integral_constant<int64_t, kAnyBytes>{});
  }
}

}  // namespace kvtable
