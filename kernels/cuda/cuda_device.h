// A CUDA device, as tables see it; ThreadsDevice says what a device does. Only nvcc compiles this.
//
// Memory comes from the driver's stream-ordered allocator, unless the caller has one, so neither taking nor
// freeing it waits for the device. Pinned memory has no such allocator: taking it may take long, and freeing
// it waits for the table's own work.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "device_block.h"
#include "kvtable/device_table.h"
#include "lanes.h"

namespace kvtable {

inline void CheckCuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kFailedPrecondition, std::string("A table on a CUDA device could not ") + what +
                                                  ": " + cudaGetErrorString(status) + ".");
}

// Makes a device the current one for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess || before_ == device) return;
    changed_ = cudaSetDevice(device) == cudaSuccess;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline constexpr int kThreadsPerBlock = 256;

template <class Body>
__global__ void __launch_bounds__(kThreadsPerBlock) RunBody(const Body body, uint64_t n) {
  RunThread(body, uint64_t{blockIdx.x} * kThreadsPerBlock + threadIdx.x, n);
}

// cub::DeviceRadixSort::SortPairs, in a file of its own for the time it takes to compile. With `scratch` null
// it only says how many bytes of it are needed.
cudaError_t SortPairsOnCuda(void* scratch, size_t* bytes, const uint32_t* firsts, uint32_t* sorted_firsts,
                            const uint32_t* seconds, uint32_t* sorted_seconds, uint64_t n, int bits,
                            cudaStream_t stream);

class CudaDevice {
 public:
  using Lanes = Warp;

  // The current one. Where `allocator` is null, memory comes from the driver.
  explicit CudaDevice(DeviceAllocator* allocator = nullptr) : allocator_(allocator) {
    CheckCuda(cudaGetDevice(&device_), "find its device");
    CheckCuda(cudaEventCreateWithFlags(&queued_, cudaEventDisableTiming), "make an event");
  }
  CudaDevice(CudaDevice&& other) noexcept
      : allocator_(other.allocator_),
        device_(other.device_),
        stream_(other.stream_),
        queued_(std::exchange(other.queued_, nullptr)) {}
  CudaDevice& operator=(CudaDevice&&) = delete;
  ~CudaDevice() {
    if (queued_ != nullptr) cudaEventDestroy(queued_);
  }

  void Begin(DeviceStream stream) {
    CheckCuda(cudaGetDevice(&callers_device_), "find the current device");
    if (callers_device_ != device_) CheckCuda(cudaSetDevice(device_), "change the device");
    stream_ = static_cast<cudaStream_t>(stream);
    const cudaError_t waits = cudaStreamWaitEvent(stream_, queued_, 0);
    if (waits != cudaSuccess) SetCallersDevice();
    CheckCuda(waits, "wait for its work on another stream");
  }
  void End() {
    cudaEventRecord(queued_, stream_);  // an error comes back from the next call
    SetCallersDevice();
  }
  void Wait() {
    stream_ = nullptr;  // the caller's stream may be gone by now
    CheckCuda(cudaEventSynchronize(queued_), "finish its work");
  }
  void WaitInside() { CheckCuda(cudaStreamSynchronize(stream_), "finish its work"); }

  void* Allocate(size_t bytes, MemoryPlace place) {
    if (place == MemoryPlace::kDevice && allocator_ != nullptr) return allocator_->Allocate(bytes);
    void* memory = nullptr;
    const cudaError_t status =
        place == MemoryPlace::kDevice
            ? cudaMallocAsync(&memory, bytes, stream_)
            : cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (status == cudaSuccess) return memory;
    cudaGetLastError();  // forget it
    if (status == cudaErrorMemoryAllocation) return nullptr;
    CheckCuda(status, "get memory");
    return nullptr;
  }
  void Free(void* memory, size_t /*bytes*/, MemoryPlace place) {
    const CurrentDevice current(device_);  // a table goes outside any operation
    if (place == MemoryPlace::kDevice && allocator_ != nullptr) {
      allocator_->Free(memory);
    } else if (place == MemoryPlace::kDevice) {
      cudaFreeAsync(memory, stream_);
    } else {
      cudaEventSynchronize(queued_);
      cudaFreeHost(memory);
    }
  }
  std::string MemoryLeft() const {
    size_t left = 0;
    size_t all = 0;
    if (cudaMemGetInfo(&left, &all) != cudaSuccess) return "the device does not say how much is free";
    return std::to_string(left) + " of the device's " + std::to_string(all) + " bytes are free";
  }

  void Copy(void* to, const void* from, size_t bytes) {
    CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy memory");
  }
  void Fill(void* to, int byte, size_t bytes) {
    CheckCuda(cudaMemsetAsync(to, byte, bytes, stream_), "fill memory");
  }

  size_t SortScratchBytes(uint64_t n) const {
    size_t bytes = 0;
    CheckCuda(SortPairsOnCuda(nullptr, &bytes, nullptr, nullptr, nullptr, nullptr, n, 32, stream_),
              "measure a sort");
    return bytes;
  }
  void SortPairs(void* scratch, size_t bytes, const uint32_t* firsts, uint32_t* sorted_firsts,
                 const uint32_t* seconds, uint32_t* sorted_seconds, uint64_t n, int bits) {
    CheckCuda(
        SortPairsOnCuda(scratch, &bytes, firsts, sorted_firsts, seconds, sorted_seconds, n, bits, stream_),
        "sort a batch");
  }

  template <class Body>
  void Launch(uint64_t n, const Body& body) {
    if (n == 0) return;
    const uint64_t blocks = (n + kThreadsPerBlock - 1) / kThreadsPerBlock;
    RunBody<<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, stream_>>>(body, n);
    CheckCuda(cudaGetLastError(), "launch a kernel");
  }

 private:
  void SetCallersDevice() {
    if (callers_device_ != device_) cudaSetDevice(callers_device_);
  }

  DeviceAllocator* allocator_;
  int device_ = 0;
  int callers_device_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t queued_ = nullptr;  // after all that was queued; a new one is nothing to wait for
};

}  // namespace kvtable
