// The threads of a kernel's device, or its stream, lent to the table engine.
#pragma once

#include <functional>

#include "kvtable/device_work.h"
#include "kvtable/parallel_for.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

class KernelThreads : public kvtable::ParallelFor {
 public:
  explicit KernelThreads(tensorflow::OpKernelContext* ctx, bool may_wait = true);
  int threads() const override { return threads_; }
  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override;
  void* stream() const override { return stream_; }
  bool may_wait() const override { return may_wait_; }

 private:
  tensorflow::thread::ThreadPool* pool_;
  int threads_;
  kvtable::DeviceStream stream_;
  bool may_wait_;
};

}  // namespace kvtools
