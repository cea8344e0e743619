#include "gpu.h"

#include <string>

#include "catch_errors.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "xla/stream_executor/stream.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

// Keeps the device's Gpu in the device's resource manager.
struct GpuResource : public tf::ResourceBase {
  std::shared_ptr<Gpu> gpu;
  std::string DebugString() const override { return "a GPU of key-value tables"; }
};

}  // namespace

kvtable::DeviceStream StreamOf(tf::OpKernelContext* ctx) {
  if (ctx->op_device_context() == nullptr || ctx->op_device_context()->stream() == nullptr) return nullptr;
  return ctx->op_device_context()->stream()->platform_specific_handle().stream;
}

absl::Status Gpu::Of(tf::OpKernelContext* ctx, std::shared_ptr<Gpu>* gpu) {
  const auto make = [&](GpuResource** made) {
    *made = nullptr;
    return CatchErrors("preparing " + ctx->device()->name() + " for", ctx->op_kernel().name(), [&] {
      auto resource = std::make_unique<GpuResource>();
      resource->gpu.reset(new Gpu(ctx->device()->GetAllocator(tf::AllocatorAttributes())));
      *made = resource.release();
      return absl::OkStatus();
    });
  };
  GpuResource* found = nullptr;
  TF_RETURN_IF_ERROR(
      ctx->resource_manager()->LookupOrCreate<GpuResource>("kvtools", "key-value tables", &found, make));
  *gpu = found->gpu;
  found->Unref();
  return absl::OkStatus();
}

}  // namespace kvtools

// For Python, which places variables.
extern "C" __attribute__((visibility("default"))) bool kvtools_has_gpu_tables() {
  return kvtable::HasDevices();
}
