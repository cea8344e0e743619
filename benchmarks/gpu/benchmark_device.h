// Where a benchmark of tables in device memory runs: on a CUDA device or, compiled with KVTABLE_ON_THREADS,
// on the CPU's threads, which only shows that the benchmark itself works.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvtable/device_table.h"

#if defined(KVTABLE_ON_THREADS)
#include "../../kernels/cuda/threads_table.h"
#include "kvtable/parallel_for.h"
#else
#include <cuda_runtime.h>
#endif

namespace kvtable {

#if defined(KVTABLE_ON_THREADS)

inline std::string DeviceName() { return "CPU threads"; }
inline void WaitForDevice() {}
inline void* AllocateZeros(size_t bytes) { return std::calloc(bytes > 0 ? bytes : 1, 1); }
inline void Free(void* memory) { std::free(memory); }
inline void CopyToDevice(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void QueueCopyOnDevice(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline std::unique_ptr<DeviceTable> MakeTable(const DeviceTableOptions& options) {
  static const std::unique_ptr<ParallelFor> pool = MakeThreadPool(2);
  return MakeThreadsTable(options, pool.get());
}
inline constexpr size_t kCopiedBytes = size_t{1} << 20;

#else

inline void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "benchmark: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

inline std::string DeviceName() {
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0));
  return device.name;
}
inline void WaitForDevice() { Check(cudaDeviceSynchronize()); }
inline void* AllocateZeros(size_t bytes) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, bytes));
  Check(cudaMemset(memory, 0, bytes));
  return memory;
}
inline void Free(void* memory) { cudaFree(memory); }
inline void CopyToDevice(void* to, const void* from, size_t bytes) {
  Check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
inline void QueueCopyOnDevice(void* to, const void* from, size_t bytes) {
  Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr));
}
inline std::unique_ptr<DeviceTable> MakeTable(const DeviceTableOptions& options) {
  return MakeCudaTable(options);
}
inline constexpr size_t kCopiedBytes = size_t{2} << 30;

#endif

// An array in device memory, of zeros at first.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t n) : data_(AllocateZeros(static_cast<size_t>(n) * sizeof(T))) {}
  ~DeviceArray() { Free(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void Set(const std::vector<T>& from) { CopyToDevice(data_, from.data(), from.size() * sizeof(T)); }
  T* data() const { return static_cast<T*>(data_); }

 private:
  void* data_;
};

// Of what `queue` queues on the default stream, until it is done.
inline double Seconds(const std::function<void()>& queue) {
  WaitForDevice();
  const auto begin = std::chrono::steady_clock::now();
  queue();
  WaitForDevice();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Bytes read and written per second by a copy within device memory.
inline double CopyBandwidth() {
  const DeviceArray<char> from(kCopiedBytes);
  const DeviceArray<char> to(kCopiedBytes);
  double best = 1e9;
  for (int i = 0; i < 10; ++i) {
    best = std::min(best, Seconds([&] { QueueCopyOnDevice(to.data(), from.data(), kCopiedBytes); }));
  }
  return 2.0 * static_cast<double>(kCopiedBytes) / std::max(best, 1e-9);
}

}  // namespace kvtable
