// The lock around updates that run as TensorFlow ops: read rows, change them, write them back.
//
// It is a resource of the step that holds it: releasing it is an op, and where that op is not reached,
// because another one of the step failed, the end of the step's tensors releases it.

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "update_lock.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// A lock that is held from Grant until Release, or until nobody refers to it.
class HeldLock : public tf::ResourceBase {
 public:
  explicit HeldLock(std::shared_ptr<UpdateLock> lock) : lock_(std::move(lock)) {}
  ~HeldLock() override { Release(); }

  void Grant() { held_ = true; }
  void Release() {
    if (held_.exchange(false)) lock_->Release();
  }

  std::string DebugString() const override { return "lock on the updates of a key-value table"; }

 private:
  const std::shared_ptr<UpdateLock> lock_;
  std::atomic<bool> held_{false};
};

class AcquireUpdateLockOp : public AsyncKernel {
 public:
  using AsyncKernel::AsyncKernel;

 protected:
  absl::Status Start(OpKernelContext* ctx, const DoneCallback& done) override {
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    const std::shared_ptr<UpdateLock> lock = resource->update_lock();
    tf::CancellationManager* const cancellation = ctx->cancellation_manager();
    const tf::CancellationToken token = cancellation == nullptr ? 0 : cancellation->get_cancellation_token();
    const auto request = std::make_shared<UpdateLock::Request>();
    // Made beforehand: once the lock is granted, there is somebody to release it.
    const tf::core::IntrusivePtr<HeldLock> held(new HeldLock(lock), /*add_ref=*/false);
    request->decided = [this, ctx, done, held, cancellation, token](bool granted) {
      if (granted) held->Grant();
      End(ctx, done, [&]() -> absl::Status {
        if (!granted) {
          return absl::CancelledError("The step was cancelled before its update of a key-value table.");
        }
        if (cancellation != nullptr) cancellation->DeregisterCallback(token);
        Tensor* out = nullptr;
        TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
        held->Ref();
        out->scalar<tf::ResourceHandle>()() =
            tf::ResourceHandle::MakeRefCountingHandle(held.get(), ctx->device()->name());
        return absl::OkStatus();
      });
    };
    if (cancellation != nullptr &&
        !cancellation->RegisterCallback(token, [lock, request] { lock->Cancel(request); })) {
      lock->Cancel(request);
    }
    lock->Acquire(request);
    return absl::OkStatus();
  }
};

class ReleaseUpdateLockOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<HeldLock> held;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &held));
    held->Release();
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableAcquireUpdateLock"), AcquireUpdateLockOp);
KVTOOLS_REGISTER(Name("KvTableReleaseUpdateLock"), ReleaseUpdateLockOp);

}  // namespace
}  // namespace kvtools
