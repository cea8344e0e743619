// The CPU as a device: runs kernel bodies on threads. It is there to test, without a GPU, all that the tables
// in device memory do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>

#include "device_block.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "lanes.h"

namespace kvtable {

// A device, this one and CudaDevice, has memory, and queues copies, fills and launches. What is queued
// between Begin(stream) and End() goes to that stream, after all that was queued before, on whatever stream.
class ThreadsDevice {
 public:
  using Lanes = OneLane;  // that kernel bodies run on

  // Allocations beyond `memory` bytes fail.
  explicit ThreadsDevice(ParallelFor* threads, size_t memory = SIZE_MAX, DeviceAllocator* allocator = nullptr)
      : threads_(threads), memory_(memory), allocator_(allocator) {}

  void Begin(DeviceStream /*stream*/) {}
  void End() {}
  // Until all that was queued is done. The first is for between operations, and what comes before the next
  // Begin goes to the default stream; the second is for within one.
  void Wait() {}
  void WaitInside() {}

  // Aligned to 256 bytes; null where there is no memory.
  void* Allocate(size_t bytes, MemoryPlace place) {
    if (bytes > memory_ - used_) return nullptr;
    void* const memory = place == MemoryPlace::kDevice && allocator_ != nullptr
                             ? allocator_->Allocate(bytes)
                             : ::operator new(bytes, std::align_val_t{256});
    if (memory != nullptr) used_ += bytes;
    return memory;
  }
  void Free(void* memory, size_t bytes, MemoryPlace place) {
    used_ -= bytes;
    if (place == MemoryPlace::kDevice && allocator_ != nullptr) return allocator_->Free(memory);
    ::operator delete(memory, std::align_val_t{256});
  }
  // How much memory there is, for messages.
  std::string MemoryLeft() const {
    return std::to_string(memory_ - used_) + " of " + std::to_string(memory_) + " bytes are free";
  }

  // Between host and device, or within it. Host memory may be reused when the call returns, or after Wait
  // where it is written.
  void Copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  void Fill(void* to, int byte, size_t bytes) { std::memset(to, byte, bytes); }

  // Sorts pairs by the low `bits` bits of their first number; equal ones stay in their order. `scratch` is of
  // SortScratchBytes(n) bytes.
  size_t SortScratchBytes(uint64_t n) const { return n * sizeof(uint32_t); }
  void SortPairs(void* scratch, size_t /*bytes*/, const uint32_t* firsts, uint32_t* sorted_firsts,
                 const uint32_t* seconds, uint32_t* sorted_seconds, uint64_t n, int bits) {
    uint32_t* const order = static_cast<uint32_t*>(scratch);
    for (uint64_t i = 0; i < n; ++i) order[i] = static_cast<uint32_t>(i);
    const uint32_t mask = bits == 32 ? UINT32_MAX : (1u << bits) - 1;
    std::stable_sort(order, order + n,
                     [=](uint32_t a, uint32_t b) { return (firsts[a] & mask) < (firsts[b] & mask); });
    for (uint64_t i = 0; i < n; ++i) {
      sorted_firsts[i] = firsts[order[i]];
      sorted_seconds[i] = seconds[order[i]];
    }
  }

  // body(lanes, first) for n keys; see lanes.h.
  template <class Body>
  void Launch(uint64_t n, const Body& body) {
    constexpr uint64_t kKeysPerTask = 64;  // few, so that threads meet
    const int64_t tasks = static_cast<int64_t>((n + kKeysPerTask - 1) / kKeysPerTask);
    if (tasks == 0) return;
    threads_->Run(tasks, [&](int64_t task) {
      const uint64_t begin = static_cast<uint64_t>(task) * kKeysPerTask;
      for (uint64_t i = begin; i < std::min(n, begin + kKeysPerTask); ++i) body(OneLane{}, i);
    });
  }

 protected:
  ParallelFor* threads_;

 private:
  size_t memory_;
  DeviceAllocator* allocator_;
  size_t used_ = 0;
};

}  // namespace kvtable
