// For functions and lambdas that do nothing but prefetch.
#pragma once

// GCC takes a function whose only effect is a prefetch for a pure one and deletes calls to it, unless they
// were inlined before it looked. So whatever prefetches, and whatever calls that, is inlined first of all.
#define KVTABLE_ALWAYS_INLINE __attribute__((always_inline))
