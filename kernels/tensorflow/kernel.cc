#include "kernel.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "catch_errors.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

// `work`, whose exceptions are of `kernel`.
template <class Work>
absl::Status CaughtOf(const tf::OpKernel& kernel, const Work& work) {
  try {
    return work();
  } catch (...) {
    return StatusOfException(absl::StrCat(kernel.type_string(), " '", kernel.name(), "'"));
  }
}

}  // namespace

Kernel::Kernel(tf::OpKernelConstruction* ctx)
    : OpKernel(ctx), on_gpu_(ctx->device_type() == tf::DEVICE_GPU) {}

void Kernel::Compute(tf::OpKernelContext* ctx) {
  OP_REQUIRES_OK(ctx, CaughtOf(*this, [&] { return Work(ctx); }));
}

void Kernel::Finish(tf::OpKernelConstruction* ctx) {
  OP_REQUIRES_OK(ctx, CaughtOf(*this, [&] { return SetUp(ctx); }));
}

void AsyncKernel::ComputeAsync(tf::OpKernelContext* ctx, DoneCallback done) {
  const absl::Status started = CaughtOf(*this, [&] { return Start(ctx, done); });
  if (started.ok()) return;
  ctx->SetStatus(started);
  done();
}

void AsyncKernel::Finish(tf::OpKernelConstruction* ctx) {
  OP_REQUIRES_OK(ctx, CaughtOf(*this, [&] { return SetUp(ctx); }));
}

}  // namespace kvtools
