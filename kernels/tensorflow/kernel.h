// The bases of all kernels. What one returns, or throws, becomes the status of its op.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "catch_errors.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

class Kernel : public tensorflow::OpKernel {
 public:
  explicit Kernel(tensorflow::OpKernelConstruction* ctx);

  // Work, and the place where exceptions of kernels are caught on their way into TensorFlow.
  void Compute(tensorflow::OpKernelContext* ctx) final;

  // Runs SetUp, for those who have made the kernel.
  void Finish(tensorflow::OpKernelConstruction* ctx);

 protected:
  // Reads attributes, and whatever else is done once. Here and not in a constructor, since it may fail.
  virtual absl::Status SetUp(tensorflow::OpKernelConstruction*) { return absl::OkStatus(); }

  virtual absl::Status Work(tensorflow::OpKernelContext* ctx) = 0;

  bool on_gpu() const { return on_gpu_; }

 private:
  const bool on_gpu_;
};

// The same for what is done later, by another thread.
class AsyncKernel : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) final;
  void Finish(tensorflow::OpKernelConstruction* ctx);

 protected:
  virtual absl::Status SetUp(tensorflow::OpKernelConstruction*) { return absl::OkStatus(); }

  // Sees to it that End is called, once; not where it fails itself.
  virtual absl::Status Start(tensorflow::OpKernelContext* ctx, const DoneCallback& done) = 0;

  // Ends the op with the status that `last`, a function of no arguments, returns; or with what it throws.
  template <class Last>
  void End(tensorflow::OpKernelContext* ctx, const DoneCallback& done, const Last& last) const {
    absl::Status ended;
    try {
      ended = last();
    } catch (...) {
      ended = StatusOfException(type_string() + " '" + name() + "'");
    }
    ctx->SetStatus(ended);
    done();
  }
};

// ReadAttrs(ctx, "dim", &dim, "mode", &mode, ...)
inline absl::Status ReadAttrs(tensorflow::OpKernelConstruction*) { return absl::OkStatus(); }
template <class Value, class... More>
absl::Status ReadAttrs(tensorflow::OpKernelConstruction* ctx, const char* name, Value* value, More... more) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, value));
  return ReadAttrs(ctx, more...);
}

// What is registered for kernel class K: K, set up.
template <class K>
class Ready final : public K {
 public:
  explicit Ready(tensorflow::OpKernelConstruction* ctx) : K(ctx) { this->Finish(ctx); }
};

}  // namespace kvtools

// KVTOOLS_REGISTER_ON(a device type, the builder without it, the kernel's class)
#define KVTOOLS_REGISTER_ON(device, builder, ...) \
  REGISTER_KERNEL_BUILDER(builder.Device(device), ::kvtools::Ready<__VA_ARGS__>)

// One kernel for CPU and GPU. What the builder names as HostMemory lies there for the kernel on a GPU, too; a
// kernel for which that is all of its tensors works on a GPU's table through copies. Where nobody says where
// an op goes it goes to the CPU, even where there is a GPU.
#define KVTOOLS_REGISTER(builder, ...)                                             \
  KVTOOLS_REGISTER_ON(::tensorflow::DEVICE_CPU, builder.Priority(1), __VA_ARGS__); \
  KVTOOLS_REGISTER_ON(::tensorflow::DEVICE_GPU, builder, __VA_ARGS__)
