// Kernels of training steps: one pass over a table's rows with their slots, the same on the buffers of
// ordinary variables, and rows as variables for optimizers that run as TensorFlow ops.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "errors.h"
#include "kvtable/optimizer.h"
#include "register_kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_var.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// The table of input 0 with the slots of one optimizer in it.
class OptimizerOp : public OpKernel {
 public:
  explicit OptimizerOp(OpKernelConstruction* ctx) : OpKernel(ctx) { ReadSlots(ctx, "slots", &slots_); }

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    std::shared_ptr<kvtable::Table> table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &resource, &table));
    KernelThreads threads(ctx);
    const TableConfig& config = resource->config();
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES_OK(ctx, Check(ctx, config));
    kvtable::SlotColumns columns;
    OP_REQUIRES_OK(ctx, CatchErrors("attaching slots to", config.name,
                                    [&] { columns = Columns(resource.get(), table, &threads); }));
    Work(ctx, resource.get(), table.get(), columns, &threads);
  }

 protected:
  // What can be refused is refused before the table gets another layout.
  virtual absl::Status Check(OpKernelContext*, const TableConfig&) { return absl::OkStatus(); }

  // `columns` are the slots' in the table.
  virtual void Work(OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
                    const kvtable::SlotColumns& columns, kvtable::ParallelFor* threads) = 0;

  void ReadSlots(OpKernelConstruction* ctx, const char* attr, std::vector<kvtable::SlotSpec>* slots) {
    std::string json;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(attr, &json));
    OP_REQUIRES_OK(
        ctx, CatchErrors("reading the slots of", name(), [&] { *slots = SlotsFromJson(Json::Parse(json)); }));
  }

  static std::vector<int> WithValue(const kvtable::SlotColumns& slots) {
    std::vector<int> columns = slots.columns;
    columns.insert(columns.begin(), 0);
    return columns;
  }

  int64_t Width(const TableConfig& config, size_t i) const {
    return i == 0 ? config.dim : slots_[i - 1].width;
  }

  std::vector<kvtable::SlotSpec> slots_;
  std::vector<kvtable::SlotSpec> all_slots_;
  int64_t generation_ = 0;

 private:
  // AttachSlots, or what it returned the last time if the table has not changed its slots since.
  kvtable::SlotColumns Columns(TableResource* resource, const std::shared_ptr<kvtable::Table>& table,
                               kvtable::ParallelFor* threads) {
    const uint64_t layout = table->generation();
    {
      std::lock_guard<std::mutex> lock(last_mu_);
      if (last_layout_ == layout && last_table_.lock() == table) return last_columns_;
    }
    kvtable::SlotColumns columns =
        resource->AttachSlots(table.get(), slots_, all_slots_, generation_, threads);
    std::lock_guard<std::mutex> lock(last_mu_);
    // The layout from before the call: if the call changed it, the next call asks again.
    last_layout_ = layout;
    last_table_ = table;
    last_columns_ = columns;
    return columns;
  }

  std::mutex last_mu_;
  std::weak_ptr<kvtable::Table> last_table_;
  uint64_t last_layout_ = 0;
  kvtable::SlotColumns last_columns_;
};

class ReadRowsOp : public OptimizerOp {
 public:
  explicit ReadRowsOp(OpKernelConstruction* ctx) : OptimizerOp(ctx) {
    ReadSlots(ctx, "all_slots", &all_slots_);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("generation", &generation_));
    std::vector<int64_t> widths;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("widths", &widths));
    OP_REQUIRES(ctx, widths.size() == slots_.size() + 1 && static_cast<int>(widths.size()) == num_outputs(),
                errors::InvalidArgument("widths names ", widths.size(), " columns, N is ", num_outputs(),
                                        ", slots are ", slots_.size()));
  }

 protected:
  void Work(OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
            const kvtable::SlotColumns& slots, kvtable::ParallelFor* threads) override {
    const TableConfig& config = resource->config();
    const std::vector<int> columns = WithValue(slots);
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    std::vector<kvtable::ColumnOut> rows;
    for (size_t i = 0; i < columns.size(); ++i) {
      Tensor* out = nullptr;
      const int64_t width = Width(config, i);
      OP_REQUIRES_OK(ctx, ctx->allocate_output(static_cast<int>(i), TensorShape({n, width}), &out));
      rows.push_back({columns[i], out->data(), width, slots.generation});
    }
    OP_REQUIRES_OK(ctx, CatchErrors("reading rows of", config.name,
                                    [&] { table->GatherColumns(keys.data(), n, rows, nullptr, *threads); }));
  }
};

class WriteRowsOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

 protected:
  void Work(OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
            const kvtable::SlotColumns& slots, kvtable::ParallelFor* threads) override {
    const TableConfig& config = resource->config();
    const std::vector<int> columns = WithValue(slots);
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES(ctx, ctx->num_inputs() == static_cast<int>(columns.size()) + 2,
                errors::InvalidArgument("got ", ctx->num_inputs() - 2, " columns for a value and ",
                                        slots_.size(), " slots"));
    std::vector<kvtable::ColumnIn> in;
    for (size_t i = 0; i < columns.size(); ++i) {
      const Tensor& rows = ctx->input(static_cast<int>(i) + 2);
      const int64_t width = Width(config, i);
      OP_REQUIRES_OK(ctx, CheckRows(config, i == 0 ? "rows" : "slot rows", keys, rows, width));
      in.push_back({columns[i], rows.data(), width, slots.generation});
    }
    OP_REQUIRES_OK(ctx, CatchErrors("updating rows of", config.name, [&] {
                     table->UpsertColumns(keys.data(), keys.NumElements(), in, {1, UnixTime()}, *threads);
                   }));
  }
};

// The attributes and inputs of an update, as the two ops below have them: hyperparameters come as scalars and
// vectors whose elements, one after the other, have the given names.
class UpdateInputs {
 public:
  absl::Status Read(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("optimizer", &optimizer_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("skip_nonfinite", &skip_nonfinite_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("stochastic_rounding", &stochastic_rounding_));
    return CatchErrors("finding", ctx->def().name(), [&] { kvtable::FindOptimizer(optimizer_); });
  }

  absl::Status Make(OpKernelContext* ctx, const std::string& variable, kvtable::Update* update) const {
    tf::OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &inputs));
    std::vector<double> numbers;
    for (const Tensor& input : inputs) Append(input, &numbers);
    if (numbers.size() != names_.size()) {
      return errors::InvalidArgument("Optimizer ", optimizer_, " of '", variable, "' got ", numbers.size(),
                                     " hyperparameters; expected ", names_.size(), ".");
    }
    std::vector<std::pair<std::string, double>> named;
    for (size_t i = 0; i < numbers.size(); ++i) named.emplace_back(names_[i], numbers[i]);
    return CatchErrors("updating", variable, [&] {
      *update = kvtable::MakeUpdate(optimizer_, named);
      update->skip_nonfinite = skip_nonfinite_;
      update->stochastic_rounding = stochastic_rounding_;
      kvtable::CheckUpdate(*update);
    });
  }

 private:
  static void Append(const Tensor& input, std::vector<double>* numbers) {
    const auto all = [&](auto flat) {
      for (int64_t i = 0; i < flat.size(); ++i) numbers->push_back(static_cast<double>(flat(i)));
    };
    switch (input.dtype()) {
      case tf::DT_FLOAT:
        return all(input.flat<float>());
      case tf::DT_DOUBLE:
        return all(input.flat<double>());
      case tf::DT_INT32:
        return all(input.flat<int32_t>());
      default:
        return all(input.flat<int64_t>());
    }
  }

  std::string optimizer_;
  std::vector<std::string> names_;
  bool skip_nonfinite_ = false;
  bool stochastic_rounding_ = false;
};

class ApplyOp : public OptimizerOp {
 public:
  explicit ApplyOp(OpKernelConstruction* ctx) : OptimizerOp(ctx) {
    ReadSlots(ctx, "all_slots", &all_slots_);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("generation", &generation_));
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
  }

 protected:
  absl::Status Check(OpKernelContext* ctx, const TableConfig& config) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckRows(config, "gradients", keys, ctx->input(3), config.dim));
    if (positions.NumElements() != 0 && positions.NumElements() != keys.NumElements()) {
      return errors::InvalidArgument("Key-value variable '", config.name, "': got ", keys.NumElements(),
                                     " keys and ", positions.NumElements(), " positions");
    }
    kvtable::Update update;
    return inputs_.Make(ctx, config.name, &update);
  }

  void Work(OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
            const kvtable::SlotColumns& slots, kvtable::ParallelFor* threads) override {
    const TableConfig& config = resource->config();
    const Tensor& keys = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    kvtable::Update update;
    OP_REQUIRES_OK(ctx, inputs_.Make(ctx, config.name, &update));
    update.seed = resource->NextSeed();
    const uint64_t* where =
        positions.NumElements() == 0 ? nullptr : static_cast<const uint64_t*>(positions.data());
    OP_REQUIRES_OK(ctx, CatchErrors("updating", config.name, [&] {
                     table->Apply(keys.data(), where, keys.NumElements(), ctx->input(3).data(), update, slots,
                                  {1, UnixTime()}, *threads);
                   }));
  }

 private:
  UpdateInputs inputs_;
};

// Sums rows of equal index, in the order in which indices first occur. 16-bit rows are summed in float32.
template <typename T>
void SumEqualRows(const std::vector<int64_t>& indices, const T* rows, int64_t dim,
                  std::vector<int64_t>* unique, Tensor* sums) {
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
  *sums = Tensor(tf::DataTypeToEnum<T>::value, TensorShape({static_cast<int64_t>(unique->size()), dim}));
  T* const out = sums->flat<T>().data();
  for (size_t i = 0; i < wide.size(); ++i) out[i] = static_cast<T>(wide[i]);
}

// The same update on ordinary variables. Holds the locks of all of them while it runs, as TensorFlow's own
// training ops do, and gives a variable whose buffer a reader still holds another one first. Variables on a
// GPU come to the host for it and go back.
class ApplyDenseOp : public OpKernel {
 public:
  explicit ApplyDenseOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), on_gpu_(ctx->device_type() == tf::DEVICE_GPU) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variable", &name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sparse", &sparse_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("whole", &whole_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<tf::core::RefCountPtr<tf::Var>> variables(static_cast<size_t>(count_));
    for (int i = 0; i < count_; ++i) {
      OP_REQUIRES_OK(
          ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, i), &variables[static_cast<size_t>(i)]));
    }
    // In the order of their addresses, so that nobody waits in a circle.
    std::vector<tf::Var*> in_order;
    for (const auto& variable : variables) in_order.push_back(variable.get());
    std::sort(in_order.begin(), in_order.end());
    OP_REQUIRES(ctx, std::unique(in_order.begin(), in_order.end()) == in_order.end(),
                errors::InvalidArgument("Variable '", name_, "' is a slot of its own."));
    std::vector<std::unique_ptr<tf::mutex_lock>> locks;
    for (tf::Var* variable : in_order) locks.push_back(std::make_unique<tf::mutex_lock>(*variable->mu()));

    const Tensor& indices = ctx->input(count_);
    const Tensor& gradients = ctx->input(count_ + 1);
    const TensorShape shape = variables[0]->tensor()->shape();
    for (const auto& variable : variables) {
      OP_REQUIRES(ctx, variable->is_initialized && variable->tensor()->IsInitialized(),
                  errors::FailedPrecondition("Variable '", name_,
                                             "' or one of its slots is not initialized: run "
                                             "tf.compat.v1.global_variables_initializer first."));
      OP_REQUIRES(ctx, variable->tensor()->dtype() == dtype_ && variable->tensor()->shape() == shape,
                  errors::InvalidArgument("A slot of variable '", name_, "' is ",
                                          tf::DataTypeString(variable->tensor()->dtype()),
                                          variable->tensor()->shape().DebugString(), ", expected ",
                                          tf::DataTypeString(dtype_), shape.DebugString()));
    }
    TensorShape expected = shape;
    if (sparse_) {
      OP_REQUIRES(ctx, shape.dims() >= 1 && indices.dims() == 1,
                  errors::InvalidArgument("Variable '", name_, "' of shape ", shape.DebugString(),
                                          " got indices of shape ", indices.shape().DebugString()));
      expected.set_dim(0, indices.NumElements());
    }
    OP_REQUIRES(ctx, gradients.shape() == expected,
                errors::InvalidArgument("Variable '", name_, "' wants a gradient of shape ",
                                        expected.DebugString(), ", got ", gradients.shape().DebugString()));
    kvtable::Update update;
    OP_REQUIRES_OK(ctx, inputs_.Make(ctx, name_, &update));
    update.seed = next_seed_.fetch_add(1, std::memory_order_relaxed);
    if (gradients.NumElements() == 0) return;

    int64_t rows = 1;  // of the variable, as the optimizer sees it
    if (sparse_ || (shape.dims() >= 2 && !whole_)) rows = shape.dim_size(0);
    const int64_t dim = shape.num_elements() / rows;
    std::vector<int64_t> unique;
    Tensor sums;
    if (sparse_) {
      std::vector<int64_t> at(static_cast<size_t>(indices.NumElements()));
      for (size_t i = 0; i < at.size(); ++i) {
        at[i] = indices.dtype() == tf::DT_INT32 ? indices.vec<int32_t>()(static_cast<int64_t>(i))
                                                : indices.vec<int64_t>()(static_cast<int64_t>(i));
        OP_REQUIRES(ctx, at[i] >= 0 && at[i] < rows,
                    errors::InvalidArgument("Variable '", name_, "' has ", rows, " rows, got index ", at[i]));
      }
      switch (dtype_) {
        case tf::DT_HALF:
          SumEqualRows(at, gradients.flat<Eigen::half>().data(), dim, &unique, &sums);
          break;
        case tf::DT_BFLOAT16:
          SumEqualRows(at, gradients.flat<tf::bfloat16>().data(), dim, &unique, &sums);
          break;
        case tf::DT_DOUBLE:
          SumEqualRows(at, gradients.flat<double>().data(), dim, &unique, &sums);
          break;
        default:
          SumEqualRows(at, gradients.flat<float>().data(), dim, &unique, &sums);
      }
    }
    KernelThreads threads(ctx);
    std::shared_ptr<Gpu> gpu;
    if (on_gpu_) OP_REQUIRES_OK(ctx, Gpu::Of(ctx, &gpu));
    std::vector<void*> columns;
    std::vector<Tensor> copies(on_gpu_ ? variables.size() : 0);  // on the host, where the rules run
    for (size_t i = 0; i < variables.size(); ++i) {
      tf::Var* const variable = variables[i].get();
      OP_REQUIRES_OK(ctx, MakeExclusive(ctx, variable, gpu.get()));
      Tensor* const tensor = variable->tensor();
      if (on_gpu_) {
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copies[i], OnHost()));
        OP_REQUIRES_OK(ctx, CatchErrors("reading", name_, [&] {
                         gpu->work()->Copy(copies[i].data(), tensor->data(), tensor->TotalBytes(),
                                           threads.stream());
                       }));
      }
      columns.push_back(on_gpu_ ? copies[i].data() : tensor->data());
    }
    const int64_t n = sparse_ ? static_cast<int64_t>(unique.size()) : rows;
    OP_REQUIRES_OK(ctx, CatchErrors("updating", name_, [&] {
                     kvtable::ApplyToArrays(update, ToValueType(dtype_), dim, columns,
                                            sparse_ ? unique.data() : nullptr, n,
                                            sparse_ ? sums.data() : gradients.data(), threads);
                     for (size_t i = 0; i < copies.size(); ++i) {
                       gpu->work()->Copy(variables[i]->tensor()->data(), copies[i].data(),
                                         copies[i].TotalBytes(), threads.stream());
                     }
                   }));
  }

 private:
  absl::Status MakeExclusive(OpKernelContext* ctx, tf::Var* variable, Gpu* gpu) const {
    Tensor* const tensor = variable->tensor();
    if (!tensor->RefCountIsOne()) {
      Tensor copy;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
      if (gpu == nullptr) {
        std::memcpy(copy.data(), tensor->data(), tensor->TotalBytes());
      } else {
        TF_RETURN_IF_ERROR(CatchErrors("copying", name_, [&] {
          gpu->work()->QueueCopy(copy.data(), tensor->data(), tensor->TotalBytes(), StreamOf(ctx));
        }));
      }
      *tensor = copy;
    }
    // From now on readers copy: sparse updates come often, and each would copy the whole otherwise.
    if (sparse_) variable->copy_on_read_mode.store(true);
    return absl::OkStatus();
  }

  const bool on_gpu_;
  tf::DataType dtype_ = tf::DT_FLOAT;
  std::string name_;
  bool sparse_ = false;
  bool whole_ = false;
  int count_ = 1;
  UpdateInputs inputs_;
  std::atomic<uint64_t> next_seed_{0};
};

class StepVariableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    auto* variable = new tf::Var(ctx->input(0).dtype());
    *variable->tensor() = ctx->input(0);
    variable->is_initialized = true;
    Tensor* out = nullptr;
    const absl::Status allocated = ctx->allocate_output(0, TensorShape({}), &out);
    if (!allocated.ok()) variable->Unref();
    OP_REQUIRES_OK(ctx, allocated);
    out->scalar<tf::ResourceHandle>()() =
        tf::ResourceHandle::MakeRefCountingHandle(variable, ctx->device()->name());
  }
};

class AssignStepVariableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<tf::Var> variable;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &variable));
    const Tensor& value = ctx->input(1);
    tf::mutex_lock lock(*variable->mu());
    OP_REQUIRES(ctx,
                value.dtype() == variable->tensor()->dtype() && value.shape() == variable->tensor()->shape(),
                errors::InvalidArgument("An optimizer assigns ", tf::DataTypeString(value.dtype()),
                                        value.shape().DebugString(), " to rows of ",
                                        tf::DataTypeString(variable->tensor()->dtype()),
                                        variable->tensor()->shape().DebugString()));
    *variable->tensor() = value;
  }
};

KVTOOLS_REGISTER(Name("KvTableApply").HostMemory("hyperparameters"), ApplyOp);
KVTOOLS_REGISTER(
    Name("KvApplyDense").HostMemory("indices").HostMemory("gradients").HostMemory("hyperparameters"),
    ApplyDenseOp);
KVTOOLS_REGISTER(Name("KvTableReadRows"), ReadRowsOp);
KVTOOLS_REGISTER(Name("KvTableWriteRows"), WriteRowsOp);
KVTOOLS_REGISTER(Name("KvTableStepVariable"), StepVariableOp);
KVTOOLS_REGISTER(Name("KvTableAssignStepVariable"), AssignStepVariableOp);

}  // namespace
}  // namespace kvtools
