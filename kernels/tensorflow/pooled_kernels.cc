// Pooled lookups in one op, and their gradients.

#include <cstring>
#include <memory>
#include <vector>

#include "errors.h"
#include "kvtable/pool_rows.h"
#include "kvtable/sum_by_key.h"
#include "segments.h"
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

// What the three kernels share: the attributes, and the ids of each table in bags.
class PoolOpBase : public OpKernel {
 public:
  explicit PoolOpBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, attrs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("outer", &outer_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weighted", &weighted_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("positive", &positive_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("filled", &filled_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &key_dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tweights", &weights_dtype_));
    std::vector<std::string> combiners;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiners", &combiners));
    for (const std::string& name : combiners) {
      combiners_.emplace_back();
      OP_REQUIRES_OK(ctx, ReadCombiner(name, &combiners_.back()));
    }
    const size_t tables = attrs_.parts.size();
    OP_REQUIRES(ctx,
                combiners_.size() == tables && outer_.size() == tables && weighted_.size() == tables &&
                    positive_.size() == tables && filled_.size() == tables,
                errors::InvalidArgument("each list of attributes must have ", tables, " entries"));
    int weights;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("W", &weights));
    const tf::DataType expected = dtype_ == tf::DT_DOUBLE ? tf::DT_DOUBLE : tf::DT_FLOAT;
    OP_REQUIRES(
        ctx, weights == 0 || weights_dtype_ == expected,
        errors::InvalidArgument("weights for rows of ", tf::DataTypeString(dtype_), " are ",
                                tf::DataTypeString(expected), ", got ", tf::DataTypeString(weights_dtype_)));
  }

 protected:
  // The bags of all tables, made in parallel, in input order.
  absl::Status MakeBags(OpKernelContext* ctx, kvtable::ParallelFor* threads,
                        std::vector<std::unique_ptr<kvtable::Bags>>* bags) const {
    tf::OpInputList keys, segments, shapes, weights, fill_keys;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    TF_RETURN_IF_ERROR(ctx->input_list("segments", &segments));
    TF_RETURN_IF_ERROR(ctx->input_list("shapes", &shapes));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    TF_RETURN_IF_ERROR(ctx->input_list("fill_keys", &fill_keys));
    int next_shape = 0, next_weights = 0, next_fill = 0;
    std::vector<kvtable::BagsInput> inputs;
    for (size_t t = 0; t < outer_.size(); ++t) {
      const int i = static_cast<int>(t);
      const int64_t n = keys[i].NumElements();
      kvtable::BagsInput in;
      in.key_type = ToKeyType(key_dtype_);
      in.value_type = ToValueType(dtype_);
      in.keys = keys[i].data();
      in.n = n;
      const bool sparse = outer_[t] >= 0;
      if (sparse && next_shape >= shapes.size()) return errors::InvalidArgument("a shape is missing");
      TF_RETURN_IF_ERROR(ReadSegments(segments[i], sparse ? &shapes[next_shape++] : nullptr, outer_[t], &in));
      if (weighted_[t]) {
        if (next_weights >= weights.size()) return errors::InvalidArgument("weights are missing");
        const Tensor& own = weights[next_weights++];
        if (own.NumElements() != n) {
          return errors::InvalidArgument("got ", n, " ids and ", own.NumElements(), " weights");
        }
        in.weights = own.data();
        in.positive_only = positive_[t];
      }
      if (filled_[t]) {
        if (next_fill >= fill_keys.size() || fill_keys[next_fill].NumElements() != 1) {
          return errors::InvalidArgument("default_id must be one key");
        }
        in.fill_key = fill_keys[next_fill++].data();
      }
      inputs.push_back(in);
    }
    bags->resize(inputs.size());
    return CatchErrors("reading the ids of", name(), [&] {
      threads->Run(static_cast<int64_t>(inputs.size()), [&](int64_t t) {
        (*bags)[static_cast<size_t>(t)] = std::make_unique<kvtable::Bags>(inputs[static_cast<size_t>(t)]);
      });
    });
  }

  // Tensor t of an input list, checked to be (bags, dim).
  absl::Status CheckPooled(const char* what, const Tensor& tensor, const kvtable::Bags& bags,
                           size_t t) const {
    if (tensor.dims() == 2 && tensor.dim_size(0) == bags.size() && tensor.dim_size(1) == attrs_.dims[t]) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument(what, " are of shape ", tensor.shape().DebugString(), ", expected [",
                                   bags.size(), ", ", attrs_.dims[t], "]");
  }

  TableListAttrs attrs_;
  std::vector<kvtable::Combiner> combiners_;
  std::vector<int64_t> outer_;
  std::vector<bool> weighted_;
  std::vector<bool> positive_;
  std::vector<bool> filled_;
  tf::DataType key_dtype_;
  tf::DataType dtype_;
  tf::DataType weights_dtype_;
};

class PoolOp : public PoolOpBase {
 public:
  explicit PoolOp(OpKernelConstruction* ctx) : PoolOpBase(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mode", &mode_));
  }

  void Compute(OpKernelContext* ctx) override {
    TableList tables;
    OP_REQUIRES_OK(ctx, tables.Find(ctx, attrs_, key_dtype_, dtype_));
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    OP_REQUIRES_OK(ctx, MakeBags(ctx, &threads, &bags));
    std::vector<kvtable::PooledLookup> lookups;
    for (size_t t = 0; t < bags.size(); ++t) {
      const int i = static_cast<int>(t);
      Tensor* rows = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, TensorShape({bags[t]->size(), attrs_.dims[t]}), &rows));
      lookups.push_back({tables.parts(i), bags[t].get(), combiners_[t], rows->data(),
                         MissingKeysOf(mode_, tables.config(i))});
    }
    OP_REQUIRES_OK(ctx,
                   CatchErrors("looking up", tables.Names(), [&] { kvtable::PoolRows(lookups, threads); }));
  }

 private:
  std::string mode_;
};

class PoolGradientOp : public PoolOpBase {
 public:
  using PoolOpBase::PoolOpBase;

  void Compute(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    OP_REQUIRES_OK(ctx, MakeBags(ctx, &threads, &bags));
    tf::OpInputList gradients;
    OP_REQUIRES_OK(ctx, ctx->input_list("gradients", &gradients));
    std::vector<kvtable::PooledGradient> sums;
    for (size_t t = 0; t < bags.size(); ++t) {
      const Tensor& gradient = gradients[static_cast<int>(t)];
      OP_REQUIRES_OK(ctx, CheckPooled("gradients", gradient, *bags[t], t));
      sums.push_back({bags[t].get(), combiners_[t], attrs_.parts[t], attrs_.dims[t], gradient.data()});
    }
    OP_REQUIRES_OK(ctx, CatchErrors("adding up the gradient of", name(), [&] {
                     const kvtable::SumByKey by_key(std::move(sums), threads);
                     Write(ctx, by_key, &threads);
                   }));
  }

 private:
  void Write(OpKernelContext* ctx, const kvtable::SumByKey& by_key, kvtable::ParallelFor* threads) {
    const int handles = ctx->num_outputs() / 2;
    int h = 0;
    std::vector<std::vector<kvtable::SumByKey::Share>> shares(attrs_.parts.size());
    for (size_t t = 0; t < attrs_.parts.size(); ++t) {
      for (int64_t p = 0; p < attrs_.parts[t]; ++p, ++h) {
        const int64_t count = by_key.count(t, p);
        Tensor *keys = nullptr, *rows = nullptr;
        OP_REQUIRES_OK(ctx, ctx->allocate_output(h, TensorShape({count}), &keys));
        OP_REQUIRES_OK(ctx, ctx->allocate_output(handles + h, TensorShape({count, attrs_.dims[t]}), &rows));
        shares[t].push_back({keys->data(), rows->data()});
      }
    }
    by_key.Write(shares, *threads);
  }
};

class PoolWeightsGradientOp : public PoolOpBase {
 public:
  explicit PoolWeightsGradientOp(OpKernelConstruction* ctx) : PoolOpBase(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mode", &mode_));
  }

  void Compute(OpKernelContext* ctx) override {
    TableList tables;
    OP_REQUIRES_OK(ctx, tables.Find(ctx, attrs_, key_dtype_, dtype_));
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    OP_REQUIRES_OK(ctx, MakeBags(ctx, &threads, &bags));
    tf::OpInputList rows, gradients, weights;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &rows));
    OP_REQUIRES_OK(ctx, ctx->input_list("gradients", &gradients));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    std::vector<kvtable::PooledWeightsGradient> lookups;
    int w = 0;
    for (size_t t = 0; t < bags.size(); ++t) {
      if (!weighted_[t]) continue;
      const int i = static_cast<int>(t);
      OP_REQUIRES_OK(ctx, CheckPooled("rows", rows[i], *bags[t], t));
      OP_REQUIRES_OK(ctx, CheckPooled("gradients", gradients[i], *bags[t], t));
      Tensor* out = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(w, weights[w].shape(), &out));
      ++w;
      if (out->NumElements() > 0) std::memset(out->data(), 0, out->TotalBytes());
      // A key that training inserted is there; if it has gone meanwhile, its initial value stands for it.
      kvtable::MissingKeys missing = MissingKeysOf(mode_, tables.config(i));
      if (missing.insert) missing.missing = kvtable::Missing::kInitial;
      lookups.push_back({tables.parts(i), bags[t].get(), combiners_[t], rows[i].data(), gradients[i].data(),
                         out->data(), missing});
    }
    OP_REQUIRES_OK(ctx, CatchErrors("looking up", tables.Names(),
                                    [&] { kvtable::PoolWeightsGradient(lookups, threads); }));
  }

 private:
  std::string mode_;
};

REGISTER_KERNEL_BUILDER(Name("KvTablePool").Device(tf::DEVICE_CPU), PoolOp);
REGISTER_KERNEL_BUILDER(Name("KvTablePoolGradient").Device(tf::DEVICE_CPU), PoolGradientOp);
REGISTER_KERNEL_BUILDER(Name("KvTablePoolWeightsGradient").Device(tf::DEVICE_CPU), PoolWeightsGradientOp);

}  // namespace
}  // namespace kvtools
