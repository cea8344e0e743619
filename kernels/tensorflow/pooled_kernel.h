// The base of kernels that pool rows: what says which id is in which row, with what weight.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "kernel.h"
#include "kvtable/bags.h"
#include "segments.h"
#include "table_resource.h"

namespace kvtools {

class PooledKernel : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(tensorflow::OpKernelConstruction* ctx) override {
    std::vector<std::string> combiners;
    int tables, weights;
    tensorflow::DataType weights_dtype;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "dims", &dims_, "outer", &outer_, "weighted", &weighted_, "dtype",
                                 &dtype_, "combiners", &combiners, "T", &tables, "W", &weights, "Tweights",
                                 &weights_dtype));
    for (const size_t entries : {dims_.size(), outer_.size(), weighted_.size(), combiners.size()}) {
      TF_RETURN_IF_ERROR(CheckEntries(entries, tables));
    }
    TF_RETURN_IF_ERROR(ReadCombiners(combiners, &combiners_));
    return weights == 0 ? absl::OkStatus() : CheckWeightsType(dtype_, weights_dtype);
  }

  static absl::Status CheckEntries(size_t entries, int tables) {
    if (entries == static_cast<size_t>(tables)) return absl::OkStatus();
    return errors::InvalidArgument("each list of attributes must have ", tables, " entries");
  }

  // The bags of all tables, made in parallel, in input order. Input `ids` has the ids of each, of `id_type`.
  absl::Status MakeBags(tensorflow::OpKernelContext* ctx, const char* ids, kvtable::KeyType id_type,
                        kvtable::ParallelFor* threads,
                        std::vector<std::unique_ptr<kvtable::Bags>>* bags) const {
    tensorflow::OpInputList keys, segments, shapes, weights;
    TF_RETURN_IF_ERROR(ctx->input_list(ids, &keys));
    TF_RETURN_IF_ERROR(ctx->input_list("segments", &segments));
    TF_RETURN_IF_ERROR(ctx->input_list("shapes", &shapes));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    int next_shape = 0, next_weights = 0;
    std::vector<kvtable::BagsInput> inputs;
    for (size_t t = 0; t < outer_.size(); ++t) {
      const int i = static_cast<int>(t);
      kvtable::BagsInput in;
      in.key_type = id_type;
      in.value_type = ToValueType(dtype_);
      in.keys = keys[i].data();
      in.n = keys[i].NumElements();
      const bool sparse = outer_[t] >= 0;
      if (sparse && next_shape >= shapes.size()) return errors::InvalidArgument("a shape is missing");
      TF_RETURN_IF_ERROR(ReadSegments(segments[i], sparse ? &shapes[next_shape++] : nullptr, outer_[t], &in));
      if (weighted_[t]) {
        if (next_weights >= weights.size()) return errors::InvalidArgument("weights are missing");
        const tensorflow::Tensor& own = weights[next_weights++];
        if (own.NumElements() != in.n) {
          return errors::InvalidArgument("got ", in.n, " ids and ", own.NumElements(), " weights");
        }
        in.weights = own.data();
      }
      TF_RETURN_IF_ERROR(Complete(ctx, t, &in));
      inputs.push_back(in);
    }
    bags->resize(inputs.size());
    threads->Run(static_cast<int64_t>(inputs.size()), [&](int64_t t) {
      (*bags)[static_cast<size_t>(t)] = std::make_unique<kvtable::Bags>(inputs[static_cast<size_t>(t)]);
    });
    return absl::OkStatus();
  }

  // Adds what else the op says of the ids of table t.
  virtual absl::Status Complete(tensorflow::OpKernelContext*, size_t, kvtable::BagsInput*) const {
    return absl::OkStatus();
  }

  // Tensor t of an input list, checked to be (bags, dim).
  absl::Status CheckPooled(const char* what, const tensorflow::Tensor& tensor, const kvtable::Bags& bags,
                           size_t t) const {
    if (tensor.dims() == 2 && tensor.dim_size(0) == bags.size() && tensor.dim_size(1) == dims_[t]) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument(what, " are of shape ", tensor.shape().DebugString(), ", expected [",
                                   bags.size(), ", ", dims_[t], "]");
  }

  // Output t: (bags, dim).
  absl::Status AllocatePooled(tensorflow::OpKernelContext* ctx, const kvtable::Bags& bags, size_t t,
                              tensorflow::Tensor** rows) const {
    tensorflow::TensorShape shape({bags.size()});
    TF_RETURN_IF_ERROR(shape.AddDimWithStatus(dims_[t]));
    return ctx->allocate_output(static_cast<int>(t), shape, rows);
  }

  std::vector<int64_t> dims_;
  std::vector<kvtable::Combiner> combiners_;
  std::vector<int64_t> outer_;
  std::vector<bool> weighted_;
  tensorflow::DataType dtype_;
};

}  // namespace kvtools
