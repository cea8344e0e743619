// Pooling of the rows that came back, and its gradients.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/placed_rows.h"
#include "segments.h"
#include "table_resource.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// What the three kernels share: the attributes, and the places of each table's ids in bags.
class ExchangePoolOpBase : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::vector<std::string> combiners;
    int tables, weights;
    tf::DataType weights_dtype;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "dims", &dims_, "outer", &outer_, "weighted", &weighted_, "dtype",
                                 &dtype_, "combiners", &combiners, "T", &tables, "W", &weights, "Tweights",
                                 &weights_dtype));
    const size_t wanted = static_cast<size_t>(tables);
    if (dims_.size() != wanted || outer_.size() != wanted || weighted_.size() != wanted ||
        combiners.size() != wanted) {
      return errors::InvalidArgument("each list of attributes must have ", tables, " entries");
    }
    TF_RETURN_IF_ERROR(ReadCombiners(combiners, &combiners_));
    return weights == 0 ? absl::OkStatus() : CheckWeightsType(dtype_, weights_dtype);
  }

  absl::Status MakeBags(OpKernelContext* ctx, kvtable::ParallelFor* threads,
                        std::vector<std::unique_ptr<kvtable::Bags>>* bags) const {
    tf::OpInputList places, segments, shapes, weights;
    TF_RETURN_IF_ERROR(ctx->input_list("places", &places));
    TF_RETURN_IF_ERROR(ctx->input_list("segments", &segments));
    TF_RETURN_IF_ERROR(ctx->input_list("shapes", &shapes));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    int next_shape = 0, next_weights = 0;
    std::vector<kvtable::BagsInput> inputs;
    for (size_t t = 0; t < outer_.size(); ++t) {
      const int i = static_cast<int>(t);
      kvtable::BagsInput in;
      in.key_type = kvtable::KeyType::kInt64;
      in.value_type = ToValueType(dtype_);
      in.keys = places[i].data();
      in.n = places[i].NumElements();
      const bool sparse = outer_[t] >= 0;
      if (sparse && next_shape >= shapes.size()) return errors::InvalidArgument("a shape is missing");
      TF_RETURN_IF_ERROR(ReadSegments(segments[i], sparse ? &shapes[next_shape++] : nullptr, outer_[t], &in));
      if (weighted_[t]) {
        if (next_weights >= weights.size()) return errors::InvalidArgument("weights are missing");
        const Tensor& own = weights[next_weights++];
        if (own.NumElements() != in.n) {
          return errors::InvalidArgument("got ", in.n, " ids and ", own.NumElements(), " weights");
        }
        in.weights = own.data();
      }
      inputs.push_back(in);
    }
    bags->resize(inputs.size());
    threads->Run(static_cast<int64_t>(inputs.size()), [&](int64_t t) {
      (*bags)[static_cast<size_t>(t)] = std::make_unique<kvtable::Bags>(inputs[static_cast<size_t>(t)]);
    });
    return absl::OkStatus();
  }

  // Tensor t of an input list, checked to be (bags, dim).
  absl::Status CheckPooled(const char* what, const Tensor& tensor, const kvtable::Bags& bags,
                           size_t t) const {
    if (tensor.dims() == 2 && tensor.dim_size(0) == bags.size() && tensor.dim_size(1) == dims_[t]) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument(what, " are of shape ", tensor.shape().DebugString(), ", expected [",
                                   bags.size(), ", ", dims_[t], "]");
  }

  std::vector<int64_t> dims_;
  std::vector<kvtable::Combiner> combiners_;
  std::vector<int64_t> outer_;
  std::vector<bool> weighted_;
  tf::DataType dtype_;
};

class ExchangePoolOp : public ExchangePoolOpBase {
 public:
  using ExchangePoolOpBase::ExchangePoolOpBase;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    const Tensor& flat = ctx->input(0);
    std::vector<kvtable::PlacedPool> pools;
    for (size_t t = 0; t < bags.size(); ++t) {
      Tensor* rows = nullptr;
      TensorShape shape({bags[t]->size()});
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(dims_[t]));
      TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(t), shape, &rows));
      pools.push_back({bags[t].get(), combiners_[t], dims_[t], rows->data()});
    }
    kvtable::PoolPlaced(pools, flat.data(), flat.NumElements(), threads);
    return absl::OkStatus();
  }
};

class ExchangePoolGradientOp : public ExchangePoolOpBase {
 public:
  using ExchangePoolOpBase::ExchangePoolOpBase;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    tf::OpInputList gradients;
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    std::vector<kvtable::PlacedGradient> placed;
    for (size_t t = 0; t < bags.size(); ++t) {
      const Tensor& gradient = gradients[static_cast<int>(t)];
      TF_RETURN_IF_ERROR(CheckPooled("gradients", gradient, *bags[t], t));
      placed.push_back({bags[t].get(), combiners_[t], dims_[t], gradient.data()});
    }
    if (ctx->input(0).NumElements() != 1) return errors::InvalidArgument("size must be one number");
    const int64_t size = *static_cast<const int64_t*>(ctx->input(0).data());
    if (size < 0) return errors::InvalidArgument("size must be 0 or more, got ", size);
    Tensor* flat = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({size}), &flat));
    kvtable::SumPlaced(placed, ToValueType(dtype_), flat->data(), size, threads);
    return absl::OkStatus();
  }
};

class ExchangePoolWeightsGradientOp : public ExchangePoolOpBase {
 public:
  using ExchangePoolOpBase::ExchangePoolOpBase;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    const Tensor& flat = ctx->input(0);
    tf::OpInputList rows, gradients, weights;
    TF_RETURN_IF_ERROR(ctx->input_list("rows", &rows));
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    std::vector<kvtable::PlacedWeightsGradient> placed;
    int w = 0;
    for (size_t t = 0; t < bags.size(); ++t) {
      if (!weighted_[t]) continue;
      const int i = static_cast<int>(t);
      TF_RETURN_IF_ERROR(CheckPooled("rows", rows[i], *bags[t], t));
      TF_RETURN_IF_ERROR(CheckPooled("gradients", gradients[i], *bags[t], t));
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(w, weights[w].shape(), &out));
      ++w;
      if (out->NumElements() > 0) std::memset(out->data(), 0, out->TotalBytes());
      placed.push_back(
          {bags[t].get(), combiners_[t], dims_[t], rows[i].data(), gradients[i].data(), out->data()});
    }
    kvtable::FindPlacedWeightsGradient(placed, flat.data(), flat.NumElements(), threads);
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvExchangePool")
                     .HostMemory("flat")
                     .HostMemory("places")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("rows"),
                 ExchangePoolOp);
KVTOOLS_REGISTER(Name("KvExchangePoolGradient")
                     .HostMemory("size")
                     .HostMemory("gradients")
                     .HostMemory("places")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("flat"),
                 ExchangePoolGradientOp);
KVTOOLS_REGISTER(Name("KvExchangePoolWeightsGradient")
                     .HostMemory("flat")
                     .HostMemory("rows")
                     .HostMemory("gradients")
                     .HostMemory("places")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("weight_gradients"),
                 ExchangePoolWeightsGradientOp);

}  // namespace
}  // namespace kvtools
