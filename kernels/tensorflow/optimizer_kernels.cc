// Kernels of training steps on a table: one pass over rows with their slots, or rows as they are for
// optimizers that run as TensorFlow ops.

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "errors.h"
#include "kernel.h"
#include "table_kernel.h"
#include "table_metadata.h"
#include "update_inputs.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// What may give a table other slots, and waits until open exports of one moment have ended: not on the thread of
// TensorFlow's that it came on, since the op that writes an export may come to need that one.
class SlotsChangeOp : public AsyncKernel {
 public:
  using AsyncKernel::AsyncKernel;

 protected:
  absl::Status Start(OpKernelContext* ctx, const DoneCallback& done) final {
    bool waits = false;
    TF_RETURN_IF_ERROR(Work(ctx, &waits));
    if (!waits) {
      done();
      return absl::OkStatus();
    }
    const auto work = [this, ctx, done] { End(ctx, done, [&] { return Work(ctx, nullptr); }); };
    try {
      std::thread(work).detach();
    } catch (const std::system_error&) {  // there are no more threads
      work();
    }
    return absl::OkStatus();
  }

  // All of the op. With `waits` it does nothing where it would have to wait, and says so there.
  virtual absl::Status Work(OpKernelContext* ctx, bool* waits) = 0;
};

// What works on a table that has the slots of one optimizer. The first step gives the table its slots.
class OptimizerOp : public SlotsChangeOp {
 public:
  using SlotsChangeOp::SlotsChangeOp;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ReadSlots(ctx, "slots", &slots_); }

  // "updating": what the kernel does to its variable, for messages.
  virtual const char* doing() const = 0;

  // What can be refused is refused before the table gets another layout.
  virtual absl::Status Check(OpKernelContext*, const TableConfig&) { return absl::OkStatus(); }

  // `columns` are the slots' in the table.
  virtual absl::Status Step(OpKernelContext* ctx, OpenTable* open, const kvtable::SlotColumns& columns) = 0;

  static absl::Status ReadSlots(OpKernelConstruction* ctx, const char* attr,
                                std::vector<kvtable::SlotSpec>* slots) {
    std::string json;
    TF_RETURN_IF_ERROR(ctx->GetAttr(attr, &json));
    *slots = SlotsFromJson(Json::Parse(json));
    return absl::OkStatus();
  }

  // For ops that say which slots the other optimizers have.
  absl::Status ReadAllSlots(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("generation", &generation_));
    TF_RETURN_IF_ERROR(ReadSlots(ctx, "all_slots", &all_slots_));
    for (const kvtable::SlotSpec& slot : slots_) {
      if (std::find(all_slots_.begin(), all_slots_.end(), slot) == all_slots_.end()) {
        return errors::InvalidArgument("slot '", slot.name, "' is not among all_slots");
      }
    }
    return absl::OkStatus();
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

 private:
  absl::Status Work(OpKernelContext* ctx, bool* waits) final {
    OpenTable open(ctx, waits == nullptr);
    TF_RETURN_IF_ERROR(LookupTable(ctx, 0, &open.resource, &open.table));
    return CatchErrors(doing(), open.config().name, [&] {
      TF_RETURN_IF_ERROR(CheckKeys(open.config(), ctx->input(1)));
      TF_RETURN_IF_ERROR(Check(ctx, open.config()));
      kvtable::SlotColumns columns;
      try {
        columns = Columns(&open);
      } catch (const kvtable::MustWait&) {
        *waits = true;
        return absl::OkStatus();
      }
      return Step(ctx, &open, columns);
    });
  }

  // AttachSlots, or what it returned the last time if the table has not changed its slots since.
  kvtable::SlotColumns Columns(OpenTable* open) {
    const uint64_t layout = open->table->generation();
    {
      std::lock_guard<std::mutex> lock(last_mu_);
      if (last_layout_ == layout && last_table_.lock() == open->table) return last_columns_;
    }
    kvtable::SlotColumns columns =
        open->resource->AttachSlots(open->table.get(), slots_, all_slots_, generation_, &open->threads);
    std::lock_guard<std::mutex> lock(last_mu_);
    // The layout from before the call: if the call changed it, the next call asks again.
    last_layout_ = layout;
    last_table_ = open->table;
    last_columns_ = columns;
    return columns;
  }

  std::vector<kvtable::SlotSpec> all_slots_;
  int64_t generation_ = 0;

  std::mutex last_mu_;
  std::weak_ptr<kvtable::Table> last_table_;
  uint64_t last_layout_ = 0;
  kvtable::SlotColumns last_columns_;
};

class ReadRowsOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::vector<int64_t> widths;
    TF_RETURN_IF_ERROR(OptimizerOp::SetUp(ctx));
    TF_RETURN_IF_ERROR(ReadAllSlots(ctx));
    TF_RETURN_IF_ERROR(ctx->GetAttr("widths", &widths));
    if (widths.size() == slots_.size() + 1 && static_cast<int>(widths.size()) == num_outputs()) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument("widths names ", widths.size(), " columns, N is ", num_outputs(),
                                   ", slots are ", slots_.size());
  }

  const char* doing() const override { return "reading rows of"; }

  absl::Status Step(OpKernelContext* ctx, OpenTable* open, const kvtable::SlotColumns& slots) override {
    const std::vector<int> columns = WithValue(slots);
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    std::vector<kvtable::ColumnOut> rows;
    for (size_t i = 0; i < columns.size(); ++i) {
      Tensor* out = nullptr;
      const int64_t width = Width(open->config(), i);
      TensorShape shape({n});
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(width));
      TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(i), shape, &out));
      if (out->dtype() != open->config().value_dtype) {
        return errors::InvalidArgument("Key-value variable '", open->config().name, "' holds ",
                                       tf::DataTypeString(open->config().value_dtype), ", wanted rows of ",
                                       tf::DataTypeString(out->dtype()));
      }
      rows.push_back({columns[i], out->data(), width, slots.generation});
    }
    open->table->GatherColumns(keys.data(), n, rows, nullptr, open->threads);
    return absl::OkStatus();
  }
};

class WriteRowsOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(OptimizerOp::SetUp(ctx));
    return ctx->GetAttr("rewrites", &rewrites_);
  }

  const char* doing() const override { return "updating rows of"; }

  absl::Status Check(OpKernelContext* ctx, const TableConfig& config) override {
    const size_t columns = slots_.size() + 1;
    if (static_cast<size_t>(ctx->num_inputs()) != columns + 2) {
      return errors::InvalidArgument("got ", ctx->num_inputs() - 2, " columns for a value and ",
                                     slots_.size(), " slots");
    }
    for (size_t i = 0; i < columns; ++i) {
      TF_RETURN_IF_ERROR(CheckRows(config, i == 0 ? "rows" : "slot rows", ctx->input(1).shape(),
                                   ctx->input(static_cast<int>(i) + 2), Width(config, i)));
    }
    return absl::OkStatus();
  }

  absl::Status Step(OpKernelContext* ctx, OpenTable* open, const kvtable::SlotColumns& slots) override {
    const std::vector<int> columns = WithValue(slots);
    const Tensor& keys = ctx->input(1);
    std::vector<kvtable::ColumnIn> in;
    for (size_t i = 0; i < columns.size(); ++i) {
      in.push_back({columns[i], ctx->input(static_cast<int>(i) + 2).data(), Width(open->config(), i),
                    slots.generation});
    }
    kvtable::Stamp stamp;
    if (rewrites_) {
      stamp.existing_only = stamp.is_rewrite = true;
      open->table->UpsertColumns(keys.data(), keys.NumElements(), in, stamp, open->threads);
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->resource.get(), open->table.get(), keys, &open->threads));
    stamp = UpdateStamp(open->config(), 1);
    stamp.ends_step = true;
    open->table->UpsertColumns(keys.data(), keys.NumElements(), in, stamp, open->threads);
    open->resource->AfterUpdate(open->table, open->threads);
    return absl::OkStatus();
  }

 private:
  bool rewrites_ = false;
};

class ApplyOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(OptimizerOp::SetUp(ctx));
    TF_RETURN_IF_ERROR(ReadAllSlots(ctx));
    int places;
    TF_RETURN_IF_ERROR(ctx->GetAttr("P", &places));
    if (places > 1) return errors::InvalidArgument("got ", places, " inputs of places, expected one or none");
    has_places_ = places == 1;
    return inputs_.Read(ctx);
  }

  const char* doing() const override { return "updating"; }

  absl::Status Check(OpKernelContext* ctx, const TableConfig& config) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckGradients(ctx, config));
    if (positions.NumElements() != 0 && positions.NumElements() != keys.NumElements()) {
      return errors::InvalidArgument("Key-value variable '", config.name, "': got ", keys.NumElements(),
                                     " keys and ", positions.NumElements(), " positions");
    }
    kvtable::Update update;
    return inputs_.Make(ctx, config.name, &update);
  }

  absl::Status Step(OpKernelContext* ctx, OpenTable* open, const kvtable::SlotColumns& slots) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    kvtable::Update update;
    TF_RETURN_IF_ERROR(inputs_.Make(ctx, open->config().name, &update));
    if (update.stochastic_rounding) update.seed = open->resource->NextSeed();
    update.float32_gradients = IsWidened(open->config(), ctx->input(3).dtype());
    const Tensor* const places = Places(ctx);
    const kvtable::GradientsIn gradients(
        ctx->input(3).data(), places == nullptr ? nullptr : static_cast<const uint32_t*>(places->data()));
    if (open->resource->gradients()->on()) Measure(ctx->input(3), gradients.places, keys.NumElements(), open);
    const uint64_t* where =
        positions.NumElements() == 0 ? nullptr : static_cast<const uint64_t*>(positions.data());
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->resource.get(), open->table.get(), keys, &open->threads));
    open->table->Apply(keys.data(), where, keys.NumElements(), gradients, update, slots,
                       UpdateStamp(open->config(), 1), open->threads);
    open->resource->AfterUpdate(open->table, open->threads);
    return absl::OkStatus();
  }

 private:
  // Null where gradients are in the order of the keys.
  const Tensor* Places(OpKernelContext* ctx) const {
    return has_places_ ? &ctx->input(ctx->num_inputs() - 1) : nullptr;
  }

  absl::Status CheckGradients(OpKernelContext* ctx, const TableConfig& config) const {
    const Tensor& keys = ctx->input(1);
    const Tensor& gradients = ctx->input(3);
    const Tensor* const places = Places(ctx);
    if (places == nullptr) return CheckRows(config, "gradients", keys.shape(), gradients, config.dim, true);
    TensorShape shape = gradients.shape();
    if (shape.dims() > 0) shape.RemoveLastDims(1);
    TF_RETURN_IF_ERROR(CheckRows(config, "gradients", shape, gradients, config.dim, true));
    const auto all = places->flat<uint32_t>();
    uint32_t greatest = 0;
    for (int64_t i = 0; i < all.size(); ++i) greatest = std::max(greatest, all(i));
    if (all.size() == keys.NumElements() && (all.size() == 0 || int64_t{greatest} < shape.num_elements())) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument("Key-value variable '", config.name, "': got ", keys.NumElements(),
                                   " keys and ", all.size(), " places, up to ", greatest, ", in ",
                                   shape.num_elements(), " gradients");
  }

  static void Measure(const Tensor& gradients, const uint32_t* places, int64_t n, OpenTable* open) {
    const auto measure = [&](const auto* rows) {
      open->resource->gradients()->Measure(rows, places, n, open->config().dim);
    };
    switch (gradients.dtype()) {
      case tf::DT_FLOAT:
        return measure(gradients.flat<float>().data());
      case tf::DT_DOUBLE:
        return measure(gradients.flat<double>().data());
      case tf::DT_HALF:
        return measure(gradients.flat<Eigen::half>().data());
      case tf::DT_BFLOAT16:
        return measure(gradients.flat<tf::bfloat16>().data());
      default:
        return;
    }
  }

  UpdateInputs inputs_;
  bool has_places_ = false;
};

class DropSlotsOp : public SlotsChangeOp {
 public:
  using SlotsChangeOp::SlotsChangeOp;

 private:
  absl::Status Work(OpKernelContext* ctx, bool* waits) final {
    OpenTable open(ctx, waits == nullptr);
    TF_RETURN_IF_ERROR(LookupTable(ctx, 0, &open.resource, &open.table));
    return CatchErrors("resetting the slots of", open.config().name, [&] {
      try {
        open.resource->DropSlots(open.table.get(), &open.threads);
      } catch (const kvtable::MustWait&) {
        *waits = true;
      }
      return absl::OkStatus();
    });
  }
};

KVTOOLS_REGISTER(Name("KvTableApply").HostMemory("hyperparameters").HostMemory("places"), ApplyOp);
KVTOOLS_REGISTER(Name("KvTableReadRows"), ReadRowsOp);
KVTOOLS_REGISTER(Name("KvTableWriteRows"), WriteRowsOp);
KVTOOLS_REGISTER(Name("KvTableDropSlots"), DropSlotsOp);

}  // namespace
}  // namespace kvtools
