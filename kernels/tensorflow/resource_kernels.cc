// Kernels of a table as a whole: its handle, what it starts from, how large it is, what slots it has.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "table_kernel.h"
#include "table_metadata.h"
#include "tensorflow/core/framework/resource_handle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class HandleOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::string eviction, initial, policies;
    TF_RETURN_IF_ERROR(ReadAttrs(
        ctx, "container", &container_, "shared_name", &shared_name_, "anonymous", &anonymous_, "variable",
        &config_.name, "key_dtype", &config_.key_dtype, "dtype", &config_.value_dtype, "dim", &config_.dim,
        "capacity_hint", &config_.capacity_hint, "max_capacity", &config_.max_capacity, "eviction", &eviction,
        "max_hbm", &config_.max_hbm, "max_memory", &config_.max_memory, "spill", &config_.spill,
        "parts_beside", &config_.parts_beside, "policies", &policies, "read_only", &config_.read_only,
        "initial", &initial, "initial_rows", &initial_rows_));
    config_.eviction = EvictionNamed(eviction);
    if (shared_name_.empty()) shared_name_ = name();
    constexpr int64_t kMaxDim = int64_t{1} << 24;  // the table engine's
    if (config_.dim > kMaxDim) {
      return errors::InvalidArgument("Key-value variable '", config_.name, "' has rows of dim ", config_.dim,
                                     ", expected 1 to ", kMaxDim);
    }
    TF_RETURN_IF_ERROR(CatchErrors("reading the policies of", config_.name, [&] {
      config_.policies = TablePolicies::Parse(policies);
      return absl::OkStatus();
    }));
    if (initial.empty()) return absl::OkStatus();
    return CatchErrors("reading the initializer of", config_.name, [&] {
      initializer_ = InitializerFromJson(Json::Parse(initial));
      return initializer_->kind == kvtable::Initializer::Kind::kRows ? SetRows() : absl::OkStatus();
    });
  }

  absl::Status Work(OpKernelContext* ctx) override {
    return CatchErrors("making the handle of", config_.name, [&] { return MakeHandle(ctx); });
  }

 private:
  absl::Status MakeHandle(OpKernelContext* ctx) const {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    TableConfig config = config_;
    if (on_gpu()) TF_RETURN_IF_ERROR(Gpu::Of(ctx, &config.gpu));
    if (anonymous_) {
      // The table goes when the last handle to it does.
      tf::ResourceHandle handle = tf::ResourceHandle::MakeRefCountingHandle(
          NewResource(ctx, config).release(), ctx->device()->name());
      handle.set_name(config.name);  // for messages, also of processes that do not have the table
      out->scalar<tf::ResourceHandle>()() = std::move(handle);
      return absl::OkStatus();
    }
    const std::string container =
        container_.empty() ? ctx->resource_manager()->default_container() : container_;
    tf::core::RefCountPtr<TableResource> resource;
    TableResource* raw = nullptr;
    TF_RETURN_IF_ERROR(ctx->resource_manager()->LookupOrCreate<TableResource>(
        container, shared_name_, &raw, [&](TableResource** made) {
          // Not past TensorFlow, which holds a lock here.
          return CatchErrors("initializing", config.name, [&] {
            *made = NewResource(ctx, config).release();
            return absl::OkStatus();
          });
        }));
    resource.reset(raw);
    TF_RETURN_IF_ERROR(CheckSame(resource->config()));
    out->scalar<tf::ResourceHandle>()() = tf::MakeResourceHandle<TableResource>(ctx, container, shared_name_);
    return absl::OkStatus();
  }

  // With its table, if the op says what that starts from.
  tf::core::RefCountPtr<TableResource> NewResource(OpKernelContext* ctx, const TableConfig& config) const {
    tf::core::RefCountPtr<TableResource> made(new TableResource(config));
    if (initializer_) made->set_table(made->NewTable(*initializer_, StreamOf(ctx)));
    return made;
  }

  // That the table which is there already is the one that the op describes.
  absl::Status CheckSame(const TableConfig& found) const {
    if (found.dim != config_.dim || found.key_dtype != config_.key_dtype ||
        found.value_dtype != config_.value_dtype) {
      return errors::InvalidArgument(
          "Key-value variable '", config_.name, "' is there already as ", tf::DataTypeString(found.key_dtype),
          " -> ", tf::DataTypeString(found.value_dtype), "[", found.dim, "], wanted ",
          tf::DataTypeString(config_.key_dtype), " -> ", tf::DataTypeString(config_.value_dtype), "[",
          config_.dim, "]: give one of them another name.");
    }
    // A read-only table is the copy that a SavedModel holds.
    if (!found.read_only && !config_.read_only &&
        (found.max_capacity != config_.max_capacity || found.eviction != config_.eviction)) {
      return errors::InvalidArgument("Key-value variable '", config_.name, "' is there already with ",
                                     BoundText(found), ", wanted ", BoundText(config_),
                                     ": give one of them another name.");
    }
    if (!found.read_only && !config_.read_only && found.policies.json != config_.policies.json) {
      return errors::InvalidArgument("Key-value variable '", config_.name,
                                     "' is there already with policies ", PoliciesText(found), ", wanted ",
                                     PoliciesText(config_), ": give one of them another name.");
    }
    return absl::OkStatus();
  }

  static std::string PoliciesText(const TableConfig& config) {
    return config.policies.json.empty() ? "none" : config.policies.json;
  }

  static std::string BoundText(const TableConfig& config) {
    if (config.max_capacity == 0) return "no max_capacity";
    return "max_capacity " + std::to_string(config.max_capacity) + " and eviction " +
           EvictionName(config.eviction);
  }

  absl::Status SetRows() {
    const size_t row_bytes = static_cast<size_t>(config_.dim * tf::DataTypeSize(config_.value_dtype));
    if (initial_rows_.empty() || initial_rows_.size() % row_bytes != 0) {
      return errors::InvalidArgument("Key-value variable '", config_.name, "' wants initial rows of ",
                                     row_bytes, " bytes each, got ", initial_rows_.size(), " bytes");
    }
    initializer_->rows =
        std::make_shared<const std::vector<char>>(initial_rows_.begin(), initial_rows_.end());
    initializer_->num_rows = static_cast<int64_t>(initial_rows_.size() / row_bytes);
    return absl::OkStatus();
  }

  std::optional<kvtable::Initializer> initializer_;
  std::string initial_rows_;
  std::string container_;
  std::string shared_name_;
  bool anonymous_ = false;
  TableConfig config_;
};

class InitializeOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::string json;
    TF_RETURN_IF_ERROR(ctx->GetAttr("initializer", &json));
    initializer_ = InitializerFromJson(Json::Parse(json));
    return absl::OkStatus();
  }

  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    const TableConfig& config = resource->config();
    return CatchErrors("initializing", config.name, [&]() -> absl::Status {
      kvtable::Initializer initializer = initializer_;
      if (initializer.kind == kvtable::Initializer::Kind::kRows) {
        const Tensor& rows = ctx->input(1);
        if (rows.dims() != 2 || rows.dim_size(0) == 0 || rows.dim_size(1) != config.dim) {
          return errors::InvalidArgument("Key-value variable '", config.name, "' of dim ", config.dim,
                                         " wants initial rows of shape [M, ", config.dim, "], got ",
                                         rows.shape().DebugString());
        }
        SetInitializerRows(rows, &initializer);
      }
      resource->set_table(resource->NewTable(initializer, StreamOf(ctx)));
      return absl::OkStatus();
    });
  }

 private:
  kvtable::Initializer initializer_;
};

class IsInitializedOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    tf::core::RefCountPtr<TableResource> resource;
    const bool found = tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource).ok();
    out->scalar<bool>()() = found && resource->table() != nullptr;
    return absl::OkStatus();
  }
};

class SizeOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "finding the size of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<int64_t>()() = open->table->Size();
    return absl::OkStatus();
  }
};

class MemoryOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "finding the memory of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({7}), &out));
    const kvtable::MemoryUse use = open->table->Memory();
    auto bytes = out->vec<int64_t>();
    bytes(0) = use.rows;
    bytes(1) = use.row_bytes;
    bytes(2) = use.index_bytes;
    const auto& admitter = open->table->admitter();
    bytes(3) = use.column_bytes + (admitter == nullptr ? 0 : admitter->bytes());
    bytes(4) = use.slack_bytes;
    bytes(5) = use.spilled_rows;
    bytes(6) = use.file_bytes;
    return absl::OkStatus();
  }
};

class UpdateCountsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "counting the updates of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const int64_t counts[] = {open->table->ZeroedRows(), open->table->SkippedUpdates(),
                              open->table->EvictedCount(), open->table->ExpiredCount()};
    for (int i = 0; i < 4; ++i) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, TensorShape({}), &out));
      out->scalar<int64_t>()() = counts[i];
    }
    return absl::OkStatus();
  }
};

class ClearOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "clearing"; }

  absl::Status WorkOn(OpKernelContext*, OpenTable* open) override {
    open->table->Clear();
    if (open->table->admitter() != nullptr) open->table->admitter()->Clear();
    return absl::OkStatus();
  }
};

class SlotsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "listing the slots of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tf::tstring>()() = SlotsToJson(open->table->slots());
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableHandle"), HandleOp);
KVTOOLS_REGISTER(Name("KvTableInitialize").HostMemory("rows"), InitializeOp);
KVTOOLS_REGISTER(Name("KvTableIsInitialized").HostMemory("initialized"), IsInitializedOp);
KVTOOLS_REGISTER(Name("KvTableSize").HostMemory("size"), SizeOp);
KVTOOLS_REGISTER(Name("KvTableMemory").HostMemory("bytes"), MemoryOp);
KVTOOLS_REGISTER(Name("KvTableUpdateCounts")
                     .HostMemory("zeroed_rows")
                     .HostMemory("skipped_updates")
                     .HostMemory("evicted_rows")
                     .HostMemory("expired_rows"),
                 UpdateCountsOp);
KVTOOLS_REGISTER(Name("KvTableClear"), ClearOp);
KVTOOLS_REGISTER(Name("KvTableSlots"), SlotsOp);

}  // namespace
}  // namespace kvtools
