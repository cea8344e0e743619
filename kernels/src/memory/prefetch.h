// Asking for cache lines that will be written.
#pragma once

#include <cstdint>

#include "base/always_inline.h"

namespace kvtable {

// As __builtin_prefetch(at, 1), which is a plain prefetch unless the compiler is told of a CPU that has more: then a
// line that another core has is read, and asked for once more when it is written, while the store waits. Here it comes
// to be written. A CPU that does not know the instruction takes it for none.
KVTABLE_ALWAYS_INLINE inline void PrefetchToWrite(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

// How memory that will be written is asked for.
struct WriteRequests {
  static constexpr int64_t kMostAhead = 32;

  bool to_be_written;     // by PrefetchToWrite; else into the second-level cache
  int64_t ahead;          // rows at random places: so many before the one being written
  int64_t in_order_from;  // rows that are written one behind the other: those of so many bytes or more
};

// What the CPU at hand is fastest with.
WriteRequests BestWriteRequests();

}  // namespace kvtable
