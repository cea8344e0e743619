// Arrays for tests of tables in device memory: plain ones where CPU threads are the device and, compiled with
// KVTABLE_TEST_CUDA, memory that the host and the CUDA device both reach.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "check.h"

#if defined(KVTABLE_TEST_CUDA)
#include <cuda_runtime.h>
#endif

namespace kvtable {

#if defined(KVTABLE_TEST_CUDA)
template <class T>
struct SharedMemory {
  using value_type = T;
  SharedMemory() = default;
  template <class U>
  SharedMemory(const SharedMemory<U>&) {}  // NOLINT(google-explicit-constructor)
  T* allocate(size_t n) {
    void* memory = nullptr;
    CHECK(cudaMallocManaged(&memory, n * sizeof(T)) == cudaSuccess);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { cudaFree(memory); }  // waits for the device
  friend bool operator==(const SharedMemory&, const SharedMemory&) { return true; }
  friend bool operator!=(const SharedMemory&, const SharedMemory&) { return false; }
};

// Before the host reads what was queued, or writes what it reads.
inline void Finish() { CHECK(cudaDeviceSynchronize() == cudaSuccess); }
#else
template <class T>
using SharedMemory = std::allocator<T>;

inline void Finish() {}
#endif

template <class T>
using Array = std::vector<T, SharedMemory<T>>;

// A vector of bool is none.
struct Flag {
  bool is_set = false;
};
inline bool* Bools(Array<Flag>* flags) { return reinterpret_cast<bool*>(flags->data()); }
static_assert(sizeof(Flag) == sizeof(bool));

}  // namespace kvtable
