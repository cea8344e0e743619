// Atomic operations on plain memory, on a GPU (at the scope of the device) and on CPU threads alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/host_device.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#endif

namespace kvtable {

#if defined(__CUDA_ARCH__)
#define KVTABLE_ATOMIC_REF(T, p) ::cuda::atomic_ref<T, ::cuda::thread_scope_device>(*(p))
#endif

// T is uint32_t or uint64_t throughout.

template <class T>
KVTABLE_HOST_DEVICE inline T LoadAcquire(T* p) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).load(::cuda::memory_order_acquire);
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline T LoadRelaxed(T* p) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).load(::cuda::memory_order_relaxed);
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline void StoreRelease(T* p, T value) {
#if defined(__CUDA_ARCH__)
  KVTABLE_ATOMIC_REF(T, p).store(value, ::cuda::memory_order_release);
#else
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline void StoreRelaxed(T* p, T value) {
#if defined(__CUDA_ARCH__)
  KVTABLE_ATOMIC_REF(T, p).store(value, ::cuda::memory_order_relaxed);
#else
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
#endif
}

// Replaces `*expected` by `desired` and returns true; or returns false, and `*expected` is what was there.
template <class T>
KVTABLE_HOST_DEVICE inline bool ReplaceAcquire(T* p, T* expected, T desired) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).compare_exchange_strong(*expected, desired, ::cuda::memory_order_acquire,
                                                          ::cuda::memory_order_relaxed);
#else
  return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline bool ReplaceRelaxed(T* p, T* expected, T desired) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).compare_exchange_strong(*expected, desired, ::cuda::memory_order_relaxed,
                                                          ::cuda::memory_order_relaxed);
#else
  return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
#endif
}

// These return what was there before. Relaxed: they order nothing else.
template <class T>
KVTABLE_HOST_DEVICE inline T FetchAdd(T* p, T value) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).fetch_add(value, ::cuda::memory_order_relaxed);
#else
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline T FetchAnd(T* p, T value) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).fetch_and(value, ::cuda::memory_order_relaxed);
#else
  return __atomic_fetch_and(p, value, __ATOMIC_RELAXED);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline T FetchOr(T* p, T value) {
#if defined(__CUDA_ARCH__)
  return KVTABLE_ATOMIC_REF(T, p).fetch_or(value, ::cuda::memory_order_relaxed);
#else
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
#endif
}

template <class T>
KVTABLE_HOST_DEVICE inline void RaiseTo(T* p, T value) {
#if defined(__CUDA_ARCH__)
  KVTABLE_ATOMIC_REF(T, p).fetch_max(value, ::cuda::memory_order_relaxed);
#else
  T seen = LoadRelaxed(p);
  while (seen < value && !ReplaceRelaxed(p, &seen, value)) {
  }
#endif
}

#if defined(__CUDA_ARCH__)
#undef KVTABLE_ATOMIC_REF
#endif

// Lets the thread that is waited for come forward.
KVTABLE_HOST_DEVICE inline void WaitAMoment() {
#if defined(__CUDA_ARCH__)
  __nanosleep(20);
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// *p = change(*p) in one step, for an element of 1, 2, 4 or 8 bytes that lies on a multiple of its size, in
// memory that begins and ends on multiples of four bytes.
template <class T, class Change>
KVTABLE_HOST_DEVICE inline void ChangeElement(T* p, const Change& change) {
  if constexpr (sizeof(T) >= 4) {
    using Word = typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type;
    Word* const word = reinterpret_cast<Word*>(p);
    Word seen = LoadRelaxed(word);
    Word changed;
    do {
      T element;
      memcpy(&element, &seen, sizeof(T));
      element = change(element);
      memcpy(&changed, &element, sizeof(T));
    } while (!ReplaceRelaxed(word, &seen, changed));
  } else {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    uint32_t* const word = reinterpret_cast<uint32_t*>(address & ~uintptr_t{3});
    const int shift = static_cast<int>(address & 3) * 8;
    const uint32_t mask = (sizeof(T) == 2 ? 0xffffu : 0xffu) << shift;
    using Bits = typename std::conditional<sizeof(T) == 2, uint16_t, uint8_t>::type;
    uint32_t seen = LoadRelaxed(word);
    uint32_t changed;
    do {
      Bits bits = static_cast<Bits>(seen >> shift);
      T element;
      memcpy(&element, &bits, sizeof(T));
      element = change(element);
      memcpy(&bits, &element, sizeof(T));
      changed = (seen & ~mask) | static_cast<uint32_t>(bits) << shift;
    } while (!ReplaceRelaxed(word, &seen, changed));
  }
}

}  // namespace kvtable
