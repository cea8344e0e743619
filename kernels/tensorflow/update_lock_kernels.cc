// The lock around updates that run as TensorFlow ops: read rows, change them, write them back.
//
// It is a resource of the step that holds it: releasing it is an op, and where that op is not reached,
// because another one of the step failed, the end of the step's tensors releases it.

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "register_kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/platform/env.h"
#include "update_lock.h"

namespace kvtools {

void UpdateLock::Acquire(const std::shared_ptr<Request>& request) {
  bool granted = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!request->cancelled && held_) {
      request->waits = true;
      waiting_.push_back(request);
      return;
    }
    granted = !request->cancelled;
    held_ = held_ || granted;
  }
  request->decided(granted);
}

void UpdateLock::Cancel(const std::shared_ptr<Request>& request) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    request->cancelled = true;
    if (!request->waits) return;
    request->waits = false;
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), request));
  }
  request->decided(false);
}

void UpdateLock::Release() {
  std::shared_ptr<Request> next;
  {
    std::lock_guard<std::mutex> lock(mu_);
    held_ = !waiting_.empty();
    if (!held_) return;
    next = std::move(waiting_.front());
    waiting_.pop_front();
    next->waits = false;
  }
  // Not here: what follows in that step must not run inside whatever let go of the lock.
  tensorflow::Env::Default()->SchedClosure([next] { next->decided(true); });
}

namespace {

namespace tf = tensorflow;
using tf::AsyncOpKernel;
using tf::OpKernel;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// A lock that is held, until Release or until nobody refers to it.
class HeldLock : public tf::ResourceBase {
 public:
  explicit HeldLock(std::shared_ptr<UpdateLock> lock) : lock_(std::move(lock)) {}
  ~HeldLock() override { Release(); }

  void Release() {
    if (!released_.exchange(true)) lock_->Release();
  }

  std::string DebugString() const override { return "lock on the updates of a key-value table"; }

 private:
  const std::shared_ptr<UpdateLock> lock_;
  std::atomic<bool> released_{false};
};

class AcquireUpdateLockOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    tf::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK_ASYNC(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource), done);
    const std::shared_ptr<UpdateLock> lock = resource->update_lock();
    tf::CancellationManager* const cancellation = ctx->cancellation_manager();
    const tf::CancellationToken token = cancellation == nullptr ? 0 : cancellation->get_cancellation_token();
    const auto request = std::make_shared<UpdateLock::Request>();
    request->decided = [ctx, done, lock, cancellation, token](bool granted) {
      if (!granted) {
        ctx->SetStatus(
            absl::CancelledError("The step was cancelled before its update of a key-value table."));
        return done();
      }
      if (cancellation != nullptr) cancellation->DeregisterCallback(token);
      auto* const held = new HeldLock(lock);
      Tensor* out = nullptr;
      const absl::Status allocated = ctx->allocate_output(0, TensorShape({}), &out);
      if (allocated.ok()) {
        out->scalar<tf::ResourceHandle>()() =
            tf::ResourceHandle::MakeRefCountingHandle(held, ctx->device()->name());
      } else {
        held->Unref();
        ctx->SetStatus(allocated);
      }
      done();
    };
    if (cancellation != nullptr &&
        !cancellation->RegisterCallback(token, [lock, request] { lock->Cancel(request); })) {
      lock->Cancel(request);
    }
    lock->Acquire(request);
  }
};

class ReleaseUpdateLockOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<HeldLock> held;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &held));
    held->Release();
  }
};

// Waits until no other update of the table is between its KvTableReadRows and its KvTableWriteRows.
REGISTER_OP("KvTableAcquireUpdateLock")
    .Input("handle: resource")
    .Output("lock: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Lets the next one go on. It is done by itself, too, when nobody has `lock` any more.
REGISTER_OP("KvTableReleaseUpdateLock")
    .Input("lock: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

KVTOOLS_REGISTER(Name("KvTableAcquireUpdateLock"), AcquireUpdateLockOp);
KVTOOLS_REGISTER(Name("KvTableReleaseUpdateLock"), ReleaseUpdateLockOp);

}  // namespace
}  // namespace kvtools
