// A GPU of TensorFlow's, as the table engine sees it: a stream, and memory to take from.
#pragma once

#include <memory>

#include "kvtable/device_table.h"
#include "kvtable/device_work.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

// The CUDA stream that a kernel's device computes on; null on the CPU.
kvtable::DeviceStream StreamOf(tensorflow::OpKernelContext* ctx);

// For temporaries of kernels that work in host memory, wherever they run.
inline tensorflow::AllocatorAttributes OnHost() {
  tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(true);
  return attributes;
}

// Of one device; kernels and tables on it share it.
class Gpu {
 public:
  // Of the device that a kernel runs on. FailedPrecondition where the table engine was built without CUDA.
  static absl::Status Of(tensorflow::OpKernelContext* ctx, std::shared_ptr<Gpu>* gpu);

  // What TensorFlow has taken from the driver, which is nearly all there is.
  kvtable::DeviceAllocator* memory() { return &memory_; }
  kvtable::DeviceWork* work() { return work_.get(); }

 private:
  class Memory : public kvtable::DeviceAllocator {
   public:
    explicit Memory(tensorflow::Allocator* allocator) : allocator_(allocator) {}
    void* Allocate(size_t bytes) override { return allocator_->AllocateRaw(256, bytes); }
    void Free(void* memory) override { allocator_->DeallocateRaw(memory); }

   private:
    tensorflow::Allocator* const allocator_;
  };

  explicit Gpu(tensorflow::Allocator* allocator)
      : memory_(allocator), work_(kvtable::Devices().work(&memory_)) {}

  Memory memory_;
  std::unique_ptr<kvtable::DeviceWork> work_;
};

}  // namespace kvtools
