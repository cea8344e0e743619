// Kernels that read a table in pieces: its keys, then columns of some of them.

#include <vector>

#include "errors.h"
#include "register_kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class KeysOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    std::shared_ptr<kvtable::Table> table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &resource, &table));
    const TableConfig& config = resource->config();
    const std::unique_ptr<kvtable::Exporter> exporter = table->Export();
    const int64_t room = exporter->max_rows();
    Tensor keys;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(config.key_dtype, TensorShape({room}), &keys, OnHost()));
    KernelThreads threads(ctx);
    int64_t n = 0;
    OP_REQUIRES_OK(ctx, CatchErrors("listing the keys of", config.name, [&] {
                     while (n < room) {
                       kvtable::Exporter::Buffers out;
                       out.keys = static_cast<char*>(keys.data()) + n * tf::DataTypeSize(config.key_dtype);
                       const int64_t got = exporter->Next(room - n, out, threads);
                       if (got == 0) break;
                       n += got;
                     }
                   }));
    ctx->set_output(0, keys.Slice(0, n));
  }
};

class ReadColumnOp : public OpKernel {
 public:
  explicit ReadColumnOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column", &column_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("width", &width_));
  }

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    std::shared_ptr<kvtable::Table> table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &resource, &table));
    const TableConfig& config = resource->config();
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES(ctx, keys.dtype() == config.key_dtype && keys.dims() == 1,
                errors::InvalidArgument("Key-value variable '", config.name, "' wants keys [n] of ",
                                        tf::DataTypeString(config.key_dtype), ", got ",
                                        tf::DataTypeString(keys.dtype()), keys.shape().DebugString()));
    int column = 0;
    int64_t width = config.dim;
    uint64_t generation = kvtable::kAnyGeneration;
    if (!column_.empty()) {
      const auto [slots, found_in] = table->schema();
      generation = found_in;
      for (size_t i = 0; i < slots.size(); ++i) {
        if (slots[i].name != column_) continue;
        column = static_cast<int>(i) + 1;
        width = slots[i].width;
      }
      OP_REQUIRES(ctx, column > 0,
                  errors::NotFound("Key-value variable '", config.name, "' has no slot '", column_,
                                   "' yet. Slots come with the optimizer's first step."));
    }
    OP_REQUIRES(ctx, width == width_,
                errors::InvalidArgument("column '", column_, "' of key-value variable '", config.name,
                                        "' is of width ", width, ", wanted ", width_));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({keys.NumElements(), width}), &rows));
    OP_REQUIRES(ctx, rows->dtype() == config.value_dtype,
                errors::InvalidArgument("Key-value variable '", config.name, "' has ",
                                        tf::DataTypeString(config.value_dtype), " rows, wanted ",
                                        tf::DataTypeString(rows->dtype())));
    KernelThreads threads(ctx);
    OP_REQUIRES_OK(ctx, CatchErrors("reading", config.name, [&] {
                     table->GatherColumns(keys.data(), keys.NumElements(),
                                          {{column, rows->data(), width, generation}}, nullptr, threads);
                   }));
  }

 private:
  std::string column_;
  int64_t width_ = 0;
};

KVTOOLS_REGISTER(Name("KvTableKeys").HostMemory("keys"), KeysOp);
KVTOOLS_REGISTER(Name("KvTableReadColumn").HostMemory("keys").HostMemory("rows"), ReadColumnOp);

}  // namespace
}  // namespace kvtools
