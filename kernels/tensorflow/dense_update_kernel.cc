// The kernel of a training step on an ordinary variable and its slots.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "catch_errors.h"
#include "errors.h"
#include "gpu.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "table_resource.h"
#include "tensorflow/core/framework/resource_var.h"
#include "update_inputs.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// Sums rows of equal index, in the order in which indices first occur. 16-bit rows are summed in float32.
// `sums` comes with the shape of the rows, and has as many as there are indices in its first ones.
template <typename T>
void SumEqualRows(const std::vector<int64_t>& indices, const T* rows, int64_t dim,
                  std::vector<int64_t>* unique, T* sums) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
  std::unordered_map<int64_t, int64_t> place;
  std::vector<Wide> wide;
  for (size_t i = 0; i < indices.size(); ++i) {
    const auto [at, is_new] = place.try_emplace(indices[i], static_cast<int64_t>(unique->size()));
    if (is_new) {
      unique->push_back(indices[i]);
      wide.resize(unique->size() * static_cast<size_t>(dim), Wide{0});
    }
    Wide* const to = wide.data() + at->second * dim;
    const T* const from = rows + static_cast<int64_t>(i) * dim;
    for (int64_t j = 0; j < dim; ++j) to[j] += static_cast<Wide>(from[j]);
  }
  for (size_t i = 0; i < wide.size(); ++i) sums[i] = static_cast<T>(wide[i]);
}

// Holds the locks of all variables while it runs, as TensorFlow's own training ops do, and gives a variable
// whose buffer a reader still holds another one first. Variables on a GPU are updated there; where that takes longer
// (DeviceWork::ApplyToArrays), and by sparse gradients, they come to the host for it and go back.
class ApplyDenseOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "dtype", &dtype_, "variable", &name_, "sparse", &sparse_, "whole",
                                 &whole_, "N", &count_));
    return inputs_.Read(ctx);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    try {
      return Update(ctx);
    } catch (...) {
      return StatusOfException("updating variable '" + name_ + "'");
    }
  }

 private:
  absl::Status Update(OpKernelContext* ctx) {
    std::vector<tf::core::RefCountPtr<tf::Var>> variables(static_cast<size_t>(count_));
    for (int i = 0; i < count_; ++i) {
      TF_RETURN_IF_ERROR(
          tf::LookupResource(ctx, tf::HandleFromInput(ctx, i), &variables[static_cast<size_t>(i)]));
    }
    // In the order of their addresses, so that nobody waits in a circle.
    std::vector<tf::Var*> in_order;
    for (const auto& variable : variables) in_order.push_back(variable.get());
    std::sort(in_order.begin(), in_order.end());
    if (std::unique(in_order.begin(), in_order.end()) != in_order.end()) {
      return errors::InvalidArgument("Variable '", name_, "' is a slot of its own.");
    }
    std::vector<std::unique_ptr<tf::mutex_lock>> locks;
    for (tf::Var* variable : in_order) locks.push_back(std::make_unique<tf::mutex_lock>(*variable->mu()));

    TF_RETURN_IF_ERROR(CheckInputs(ctx, variables));
    const Tensor& gradients = ctx->input(count_ + 1);
    kvtable::Update update;
    TF_RETURN_IF_ERROR(inputs_.Make(ctx, name_, &update));
    if (gradients.NumElements() == 0) return absl::OkStatus();

    const TensorShape shape = variables[0]->tensor()->shape();
    int64_t rows = 1;  // of the variable, as the optimizer sees it
    if (sparse_ || (shape.dims() >= 2 && !whole_)) rows = shape.dim_size(0);
    std::vector<int64_t> indices;
    if (sparse_) TF_RETURN_IF_ERROR(ReadIndices(ctx->input(count_), rows, &indices));
    const int64_t dim = shape.num_elements() / rows;  // where there is an index, there is a row
    KernelThreads threads(ctx);
    std::shared_ptr<Gpu> gpu;
    if (on_gpu()) TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    std::vector<void*> columns;
    for (const auto& variable : variables) {
      TF_RETURN_IF_ERROR(MakeExclusive(ctx, variable.get(), gpu.get()));
      columns.push_back(variable->tensor()->data());
    }
    const kvtable::ValueType type = ToValueType(dtype_);
    if (on_gpu() && !sparse_ &&
        gpu->work()->ApplyToArrays(update, type, dim, columns, rows, gradients.data(), threads.stream())) {
      return absl::OkStatus();
    }
    std::vector<Tensor> copies(on_gpu() ? variables.size() + 1 : 0);  // on the host, where the rules run
    const auto copy = [&](const Tensor& from, Tensor* to) {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(from.dtype(), from.shape(), to, OnHost()));
      gpu->work()->Copy(to->data(), from.data(), from.TotalBytes(), threads.stream());
      return absl::OkStatus();
    };
    for (size_t i = 0; on_gpu() && i < variables.size(); ++i) {
      TF_RETURN_IF_ERROR(copy(*variables[i]->tensor(), &copies[i]));
      columns[i] = copies[i].data();
    }
    if (on_gpu()) TF_RETURN_IF_ERROR(copy(gradients, &copies.back()));
    const Tensor& there = on_gpu() ? copies.back() : gradients;
    if (sparse_) {
      std::vector<int64_t> unique;
      Tensor sums;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype_, gradients.shape(), &sums, OnHost()));
      SumRows(indices, there, dim, &unique, &sums);
      kvtable::ApplyToArrays(update, type, dim, columns, unique.data(), static_cast<int64_t>(unique.size()),
                             sums.data(), threads);
    } else {
      kvtable::ApplyToArrays(update, type, dim, columns, nullptr, rows, there.data(), threads);
    }
    for (size_t i = 0; on_gpu() && i < variables.size(); ++i) {
      gpu->work()->Copy(variables[i]->tensor()->data(), copies[i].data(), copies[i].TotalBytes(),
                        threads.stream());
    }
    return absl::OkStatus();
  }

  absl::Status CheckInputs(OpKernelContext* ctx,
                           const std::vector<tf::core::RefCountPtr<tf::Var>>& variables) const {
    const Tensor& indices = ctx->input(count_);
    const Tensor& gradients = ctx->input(count_ + 1);
    const TensorShape shape = variables[0]->tensor()->shape();
    for (const auto& variable : variables) {
      if (!variable->is_initialized || !variable->tensor()->IsInitialized()) {
        return errors::FailedPrecondition("Variable '", name_,
                                          "' or one of its slots is not initialized: run "
                                          "tf.compat.v1.global_variables_initializer first.");
      }
      if (variable->tensor()->dtype() != dtype_ || variable->tensor()->shape() != shape) {
        return errors::InvalidArgument("A slot of variable '", name_, "' is ",
                                       tf::DataTypeString(variable->tensor()->dtype()),
                                       variable->tensor()->shape().DebugString(), ", expected ",
                                       tf::DataTypeString(dtype_), shape.DebugString());
      }
    }
    TensorShape expected = shape;
    if (sparse_) {
      if (shape.dims() < 1 || indices.dims() != 1) {
        return errors::InvalidArgument("Variable '", name_, "' of shape ", shape.DebugString(),
                                       " got indices of shape ", indices.shape().DebugString());
      }
      TF_RETURN_IF_ERROR(expected.SetDimWithStatus(0, indices.NumElements()));
    }
    if (gradients.shape() == expected) return absl::OkStatus();
    return errors::InvalidArgument("Variable '", name_, "' wants a gradient of shape ",
                                   expected.DebugString(), ", got ", gradients.shape().DebugString());
  }

  absl::Status ReadIndices(const Tensor& from, int64_t rows, std::vector<int64_t>* indices) const {
    indices->resize(static_cast<size_t>(from.NumElements()));
    for (size_t i = 0; i < indices->size(); ++i) {
      const int64_t at = from.dtype() == tf::DT_INT32 ? from.vec<int32_t>()(static_cast<int64_t>(i))
                                                      : from.vec<int64_t>()(static_cast<int64_t>(i));
      if (at < 0 || at >= rows) {
        return errors::InvalidArgument("Variable '", name_, "' has ", rows, " rows, got index ", at);
      }
      (*indices)[i] = at;
    }
    return absl::OkStatus();
  }

  void SumRows(const std::vector<int64_t>& indices, const Tensor& rows, int64_t dim,
               std::vector<int64_t>* unique, Tensor* sums) const {
    const auto sum = [&](auto one) {
      using T = decltype(one);
      SumEqualRows(indices, static_cast<const T*>(rows.data()), dim, unique, static_cast<T*>(sums->data()));
    };
    switch (dtype_) {
      case tf::DT_HALF:
        return sum(Eigen::half());
      case tf::DT_BFLOAT16:
        return sum(tf::bfloat16());
      case tf::DT_DOUBLE:
        return sum(double());
      default:
        return sum(float());
    }
  }

  absl::Status MakeExclusive(OpKernelContext* ctx, tf::Var* variable, Gpu* gpu) const {
    Tensor* const tensor = variable->tensor();
    if (!tensor->RefCountIsOne()) {
      Tensor copy;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
      if (gpu == nullptr) {
        std::memcpy(copy.data(), tensor->data(), tensor->TotalBytes());
      } else {
        gpu->work()->QueueCopy(copy.data(), tensor->data(), tensor->TotalBytes(), StreamOf(ctx));
      }
      *tensor = copy;
    }
    // From now on readers copy: sparse updates come often, and each would copy the whole otherwise.
    if (sparse_) variable->copy_on_read_mode.store(true);
    return absl::OkStatus();
  }

  tf::DataType dtype_ = tf::DT_FLOAT;
  std::string name_;
  bool sparse_ = false;
  bool whole_ = false;
  int count_ = 1;
  UpdateInputs inputs_;
};

KVTOOLS_REGISTER(Name("KvApplyDense").HostMemory("indices").HostMemory("hyperparameters"), ApplyDenseOp);

}  // namespace
}  // namespace kvtools
