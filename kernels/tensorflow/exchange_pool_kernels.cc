// Pooling of the rows that came back, and its gradients.

#include <cstring>
#include <memory>
#include <vector>

#include "arrival.h"
#include "current_exchange.h"
#include "errors.h"
#include "flat_type.h"
#include "kernel_threads.h"
#include "kvtable/placed_rows.h"
#include "pooled_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// What the three kernels share: ids are places in the rows that came.
class ExchangePoolOpBase : public PooledKernel {
 public:
  using PooledKernel::PooledKernel;

 protected:
  absl::Status SetUp(tf::OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(PooledKernel::SetUp(ctx));
    return ReadFlatType(ctx, dtype_, &flat_);
  }

  absl::Status MakeBags(OpKernelContext* ctx, kvtable::ParallelFor* threads,
                        std::vector<std::unique_ptr<kvtable::Bags>>* bags) const {
    return PooledKernel::MakeBags(ctx, "places", kvtable::KeyType::kInt64, threads, bags);
  }

  // What came, in input 0.
  absl::Status ReadRows(OpKernelContext* ctx, kvtable::PlacedRows* rows) const {
    Received received;
    TF_RETURN_IF_ERROR(received.Read(ctx->input(0)));
    const int64_t size = kvtable::SizeOf(flat_);
    if (tf::DataTypeSize(received.dtype) != size) {
      return errors::InvalidArgument("what came is of ", tf::DataTypeString(received.dtype));
    }
    rows->type = flat_;
    for (const auto& piece : received.pieces) rows->pieces.push_back({piece.data, piece.bytes / size});
    return absl::OkStatus();
  }

  kvtable::ValueType flat_;
};

class ExchangePoolOp : public ExchangePoolOpBase {
 public:
  using ExchangePoolOpBase::ExchangePoolOpBase;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    kvtable::PlacedRows flat;
    TF_RETURN_IF_ERROR(ReadRows(ctx, &flat));
    std::vector<kvtable::PlacedPool> pools;
    for (size_t t = 0; t < bags.size(); ++t) {
      Tensor* rows = nullptr;
      TF_RETURN_IF_ERROR(AllocatePooled(ctx, *bags[t], t, &rows));
      pools.push_back({bags[t].get(), combiners_[t], dims_[t], rows->data()});
    }
    kvtable::PoolPlaced(pools, flat, threads);
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
    TF_RETURN_IF_ERROR(AllocateToSend(ctx, 0, TensorShape({size}), &flat));
    kvtable::SumPlaced(placed, flat_, flat->data(), size, threads);
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
    kvtable::PlacedRows flat;
    TF_RETURN_IF_ERROR(ReadRows(ctx, &flat));
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
    kvtable::FindPlacedWeightsGradient(placed, flat, threads);
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
