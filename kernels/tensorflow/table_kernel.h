// The base of kernels that work on the table of input 0.
#pragma once

#include <memory>

#include "catch_errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "table_resource.h"

namespace kvtools {

// A table that is initialized, and the threads to work on it with.
struct OpenTable {
  explicit OpenTable(tensorflow::OpKernelContext* ctx, bool may_wait = true) : threads(ctx, may_wait) {}

  tensorflow::core::RefCountPtr<TableResource> resource;
  std::shared_ptr<kvtable::Table> table;
  KernelThreads threads;

  const TableConfig& config() const { return resource->config(); }
};

class TableKernel : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(tensorflow::OpKernelContext* ctx) final {
    OpenTable open(ctx);
    TF_RETURN_IF_ERROR(LookupTable(ctx, 0, &open.resource, &open.table));
    return CatchErrors(doing(), open.config().name, [&] { return WorkOn(ctx, &open); });
  }

  // "looking up", "writing to": what the kernel does to its variable, for messages.
  virtual const char* doing() const = 0;

  virtual absl::Status WorkOn(tensorflow::OpKernelContext* ctx, OpenTable* open) = 0;
};

}  // namespace kvtools
