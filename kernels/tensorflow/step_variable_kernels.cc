// Kernels of rows as variables that live for one step.

#include "errors.h"
#include "kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_var.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class StepVariableOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<tf::Var> variable(new tf::Var(ctx->input(0).dtype()));
    *variable->tensor() = ctx->input(0);
    variable->is_initialized = true;
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tf::ResourceHandle>()() =
        tf::ResourceHandle::MakeRefCountingHandle(variable.release(), ctx->device()->name());
    return absl::OkStatus();
  }
};

class AssignStepVariableOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<tf::Var> variable;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &variable));
    const Tensor& value = ctx->input(1);
    tf::mutex_lock lock(*variable->mu());
    if (value.dtype() != variable->tensor()->dtype() || value.shape() != variable->tensor()->shape()) {
      return errors::InvalidArgument("An optimizer assigns ", tf::DataTypeString(value.dtype()),
                                     value.shape().DebugString(), " to rows of ",
                                     tf::DataTypeString(variable->tensor()->dtype()),
                                     variable->tensor()->shape().DebugString());
    }
    *variable->tensor() = value;
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableStepVariable"), StepVariableOp);
KVTOOLS_REGISTER(Name("KvTableAssignStepVariable"), AssignStepVariableOp);

}  // namespace
}  // namespace kvtools
