// Lookups of several tables, or of the parts of one, in one op; and their gradient.

#include <vector>

#include "errors.h"
#include "huge_output.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/split_by_part.h"
#include "table_list.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class GatherManyOp : public OpKernel {
 public:
  explicit GatherManyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, attrs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mode", &mode_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("remember", &remember_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &key_dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

  void Compute(OpKernelContext* ctx) override {
    TableList tables;
    OP_REQUIRES_OK(ctx, tables.Find(ctx, attrs_, key_dtype_, dtype_));
    tf::OpInputList keys;
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    std::vector<kvtable::PartsLookup> lookups;
    for (int t = 0; t < attrs_.tables(); ++t) {
      TensorShape shape = keys[t].shape();
      OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(attrs_.dims[static_cast<size_t>(t)]));
      Tensor* rows = nullptr;
      Tensor* positions = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(t, shape, &rows));
      WantHugePages(*rows);
      OP_REQUIRES_OK(ctx, ctx->allocate_output(attrs_.tables() + t,
                                               remember_ ? keys[t].shape() : TensorShape({0}), &positions));
      const kvtable::RowsOut out(rows->data(),
                                 remember_ ? static_cast<uint64_t*>(positions->data()) : nullptr);
      lookups.push_back({tables.parts(t), keys[t].data(), keys[t].NumElements(), out,
                         MissingKeysOf(mode_, tables.config(t))});
    }
    KernelThreads threads(ctx);
    OP_REQUIRES_OK(
        ctx, CatchErrors("looking up", tables.Names(), [&] { kvtable::LookUpParts(lookups, threads); }));
  }

 private:
  TableListAttrs attrs_;
  std::string mode_;
  bool remember_ = false;
  tf::DataType key_dtype_;
  tf::DataType dtype_;
};

class SplitGradientsOp : public OpKernel {
 public:
  explicit SplitGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, attrs_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    tf::OpInputList keys, gradients, positions;
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("gradients", &gradients));
    OP_REQUIRES_OK(ctx, ctx->input_list("positions", &positions));
    KernelThreads threads(ctx);
    int h = 0;
    for (int t = 0; t < attrs_.tables(); ++t) {
      const int64_t dim = attrs_.dims[static_cast<size_t>(t)];
      const int64_t n = keys[t].NumElements();
      OP_REQUIRES(ctx, gradients[t].NumElements() == n * dim,
                  errors::InvalidArgument("gradients of ", n, " keys are of shape ",
                                          gradients[t].shape().DebugString(), ", expected rows of ", dim));
      const bool remembered = positions[t].NumElements() == n;
      Split(ctx, keys[t], gradients[t], remembered ? &positions[t] : nullptr, dim,
            attrs_.parts[static_cast<size_t>(t)], h, &threads);
      if (!ctx->status().ok()) return;
      h += static_cast<int>(attrs_.parts[static_cast<size_t>(t)]);
    }
  }

 private:
  void Split(OpKernelContext* ctx, const Tensor& keys, const Tensor& rows, const Tensor* positions,
             int64_t dim, int64_t parts, int first, kvtable::ParallelFor* threads) {
    const int64_t n = keys.NumElements();
    const int all = ctx->num_outputs() / 3;
    if (parts == 1) {  // nothing to take apart, and so nothing to copy
      SetReshaped(ctx, first, keys, TensorShape({n}));
      SetReshaped(ctx, all + first, rows, TensorShape({n, dim}));
      const Tensor none(tf::DT_INT64, TensorShape({0}));
      SetReshaped(ctx, 2 * all + first, positions == nullptr ? none : *positions,
                  TensorShape({positions == nullptr ? 0 : n}));
      return;
    }
    const kvtable::SplitByPart split(ToKeyType(keys.dtype()), keys.data(), n, parts, *threads);
    std::vector<kvtable::SplitByPart::Share> shares;
    for (int p = 0; p < static_cast<int>(parts); ++p) {
      const int64_t count = split.count(p);
      Tensor *part_keys = nullptr, *part_rows = nullptr, *part_positions = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(first + p, TensorShape({count}), &part_keys));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(all + first + p, TensorShape({count, dim}), &part_rows));
      WantHugePages(*part_rows);
      OP_REQUIRES_OK(
          ctx, ctx->allocate_output(2 * all + first + p, TensorShape({positions == nullptr ? 0 : count}),
                                    &part_positions));
      shares.push_back(
          {part_keys->data(), part_rows->data(), static_cast<uint64_t*>(part_positions->data())});
    }
    split.Write(rows.data(), dim * tf::DataTypeSize(rows.dtype()),
                positions == nullptr ? nullptr : static_cast<const uint64_t*>(positions->data()), shares,
                *threads);
  }

  static void SetReshaped(OpKernelContext* ctx, int output, const Tensor& tensor, const TensorShape& shape) {
    Tensor reshaped;
    if (!reshaped.CopyFrom(tensor, shape)) {
      ctx->CtxFailure(
          errors::Internal("cannot take ", tensor.shape().DebugString(), " for ", shape.DebugString()));
      return;
    }
    ctx->set_output(output, reshaped);
  }

  TableListAttrs attrs_;
};

REGISTER_KERNEL_BUILDER(Name("KvTableGatherMany").Device(tf::DEVICE_CPU), GatherManyOp);
REGISTER_KERNEL_BUILDER(Name("KvTableSplitGradients").Device(tf::DEVICE_CPU), SplitGradientsOp);

}  // namespace
}  // namespace kvtools
