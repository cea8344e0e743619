// Kernels of the resource itself, of lookups, writes, export and import.

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "huge_output.h"
#include "kvtable/part_of.h"
#include "register_kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class HandleOp : public OpKernel {
 public:
  explicit HandleOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), on_gpu_(ctx->device_type() == tf::DEVICE_GPU) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &anonymous_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variable", &config_.name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key_dtype", &config_.key_dtype));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &config_.value_dtype));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &config_.dim));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity_hint", &config_.capacity_hint));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_capacity", &config_.max_capacity));
    std::string eviction;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("eviction", &eviction));
    config_.eviction = EvictionNamed(eviction);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_hbm", &config_.max_hbm));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("read_only", &config_.read_only));
    if (shared_name_.empty()) shared_name_ = name();
    std::string initial;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initial", &initial));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initial_rows", &initial_rows_));
    if (initial.empty()) return;
    OP_REQUIRES_OK(ctx, CatchErrors("reading the initializer of", config_.name, [&] {
                     initializer_ = InitializerFromJson(Json::Parse(initial));
                     if (initializer_->kind == kvtable::Initializer::Kind::kRows) SetRows();
                   }));
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    TableConfig config = config_;
    if (on_gpu_) OP_REQUIRES_OK(ctx, Gpu::Of(ctx, &config.gpu));
    if (anonymous_) {
      // The table goes when the last handle to it does.
      out->scalar<tf::ResourceHandle>()() =
          tf::ResourceHandle::MakeRefCountingHandle(new TableResource(config), ctx->device()->name());
      return;
    }
    tf::core::RefCountPtr<TableResource> resource;
    TableResource* raw = nullptr;
    const std::string container =
        container_.empty() ? ctx->resource_manager()->default_container() : container_;
    OP_REQUIRES_OK(ctx, ctx->resource_manager()->LookupOrCreate<TableResource>(
                            container, shared_name_, &raw, [&](TableResource** created) {
                              *created = new TableResource(config);
                              return Initialize(*created, StreamOf(ctx));
                            }));
    resource.reset(raw);
    const TableConfig& found = resource->config();
    OP_REQUIRES(ctx,
                found.dim == config_.dim && found.key_dtype == config_.key_dtype &&
                    found.value_dtype == config_.value_dtype,
                errors::InvalidArgument("Key-value variable '", config_.name, "' is there already as ",
                                        tf::DataTypeString(found.key_dtype), " -> ",
                                        tf::DataTypeString(found.value_dtype), "[", found.dim, "], wanted ",
                                        tf::DataTypeString(config_.key_dtype), " -> ",
                                        tf::DataTypeString(config_.value_dtype), "[", config_.dim,
                                        "]: give one of them another name."));
    // A read-only table is the copy that a SavedModel holds.
    OP_REQUIRES(ctx,
                found.read_only || config_.read_only ||
                    (found.max_capacity == config_.max_capacity && found.eviction == config_.eviction),
                errors::InvalidArgument("Key-value variable '", config_.name, "' is there already with ",
                                        BoundText(found), ", wanted ", BoundText(config_),
                                        ": give one of them another name."));
    out->scalar<tf::ResourceHandle>()() = tf::MakeResourceHandle<TableResource>(ctx, container, shared_name_);
  }

 private:
  static std::string BoundText(const TableConfig& config) {
    if (config.max_capacity == 0) return "no max_capacity";
    return "max_capacity " + std::to_string(config.max_capacity) + " and eviction " +
           EvictionName(config.eviction);
  }

  void SetRows() {
    const int64_t row_bytes = config_.dim * tf::DataTypeSize(config_.value_dtype);
    initializer_->rows =
        std::make_shared<const std::vector<char>>(initial_rows_.begin(), initial_rows_.end());
    initializer_->num_rows = static_cast<int64_t>(initial_rows_.size()) / row_bytes;
  }

  absl::Status Initialize(TableResource* resource, kvtable::DeviceStream stream) const {
    if (!initializer_.has_value()) return absl::OkStatus();
    const absl::Status made = CatchErrors("initializing", config_.name, [&] {
      resource->set_table(resource->NewTable(*initializer_, stream));
    });
    if (!made.ok()) resource->Unref();
    return made;
  }

  const bool on_gpu_;
  std::optional<kvtable::Initializer> initializer_;
  std::string initial_rows_;
  std::string container_;
  std::string shared_name_;
  bool anonymous_ = false;
  TableConfig config_;
};

class InitializeOp : public OpKernel {
 public:
  explicit InitializeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string json;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer", &json));
    OP_REQUIRES_OK(ctx, CatchErrors("reading the initializer of", name(),
                                    [&] { initializer_ = InitializerFromJson(Json::Parse(json)); }));
  }

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    kvtable::Initializer initializer = initializer_;
    const TableConfig& config = resource->config();
    if (initializer.kind == kvtable::Initializer::Kind::kRows) {
      const Tensor& rows = ctx->input(1);
      OP_REQUIRES(ctx, rows.dims() == 2 && rows.dim_size(0) > 0 && rows.dim_size(1) == config.dim,
                  errors::InvalidArgument("Key-value variable '", config.name, "' of dim ", config.dim,
                                          " wants initial rows of shape [M, ", config.dim, "], got ",
                                          rows.shape().DebugString()));
      SetInitializerRows(rows, &initializer);
    }
    OP_REQUIRES_OK(ctx, CatchErrors("initializing", config.name, [&] {
                     resource->set_table(resource->NewTable(initializer, StreamOf(ctx)));
                   }));
  }

 private:
  kvtable::Initializer initializer_;
};

class IsInitializedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    tf::core::RefCountPtr<TableResource> resource;
    const bool found = tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource).ok();
    out->scalar<bool>()() = found && resource->table() != nullptr;
  }
};

// What the kernels below share: the table of input 0, and the threads to work with.
class TableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    std::shared_ptr<kvtable::Table> table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &resource, &table));
    KernelThreads threads(ctx);
    // What a GPU's table waits for may fail in any call.
    OP_REQUIRES_OK(ctx, CatchErrors("reaching", resource->config().name,
                                    [&] { Work(ctx, resource->config(), table.get(), &threads); }));
  }

 protected:
  virtual void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
                    kvtable::ParallelFor* threads) = 0;
};

class SizeOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig&, kvtable::Table* table, kvtable::ParallelFor*) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<int64_t>()() = table->Size();
  }
};

class MemoryOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig&, kvtable::Table* table, kvtable::ParallelFor*) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({5}), &out));
    const kvtable::MemoryUse use = table->Memory();
    auto bytes = out->vec<int64_t>();
    bytes(0) = use.rows;
    bytes(1) = use.row_bytes;
    bytes(2) = use.index_bytes;
    bytes(3) = use.column_bytes;
    bytes(4) = use.slack_bytes;
  }
};

// A bool for each key: Contains or Zeroed.
template <void (kvtable::Table::*kAsk)(const void*, int64_t, bool*, kvtable::ParallelFor&) const>
class AskOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &out));
    OP_REQUIRES_OK(ctx, CatchErrors("looking up", config.name, [&] {
                     (table->*kAsk)(keys.data(), keys.NumElements(), static_cast<bool*>(out->data()),
                                    *threads);
                   }));
  }
};

class UpdateCountsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig&, kvtable::Table* table, kvtable::ParallelFor*) override {
    Tensor* zeroed = nullptr;
    Tensor* skipped = nullptr;
    Tensor* evicted = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &zeroed));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &skipped));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({}), &evicted));
    zeroed->scalar<int64_t>()() = table->ZeroedRows();
    skipped->scalar<int64_t>()() = table->SkippedUpdates();
    evicted->scalar<int64_t>()() = table->EvictedCount();
  }
};

class ClearOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor*) override {
    OP_REQUIRES_OK(ctx, CatchErrors("clearing", config.name, [&] { table->Clear(); }));
  }
};

class SlotsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig&, kvtable::Table* table, kvtable::ParallelFor*) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tf::tstring>()() = SlotsToJson(table->slots());
  }
};

// What a batch evicts, as outputs of the op.
class EvictedOutputs : public kvtable::EvictedRows {
 public:
  EvictedOutputs(OpKernelContext* ctx, int64_t dim) : ctx_(ctx), dim_(dim) {}

  void Allocate(int64_t n, void** keys, void** rows) override {
    *keys = Output(2, TensorShape({n}));
    *rows = Output(3, TensorShape({n, dim_}));
    allocated_ = true;
  }
  void AllocateUnlessDone() {
    void* none = nullptr;
    if (!allocated_) Allocate(0, &none, &none);
  }

 private:
  void* Output(int i, const TensorShape& shape) {
    Tensor* out = nullptr;
    if (!ctx_->allocate_output(i, shape, &out).ok()) throw std::bad_alloc();
    return out->data();
  }

  OpKernelContext* const ctx_;
  const int64_t dim_;
  bool allocated_ = false;
};

template <bool kEvicting>
class GatherOp : public TableOp {
 public:
  explicit GatherOp(OpKernelConstruction* ctx) : TableOp(ctx) {
    if (!kEvicting) OP_REQUIRES_OK(ctx, ctx->GetAttr("mode", &mode_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("admission", &admission_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("remember", &remember_));
  }

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES(ctx, dim_ == config.dim && expected_output_dtype(0) == config.value_dtype,
                errors::InvalidArgument("Key-value variable '", config.name, "' has rows of ",
                                        tf::DataTypeString(config.value_dtype), "[", config.dim, "], wanted ",
                                        tf::DataTypeString(expected_output_dtype(0)), "[", dim_, "]"));
    TensorShape shape = keys.shape();
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(config.dim));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    WantHugePages(ctx, *out);
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, remember_ ? keys.shape() : TensorShape({0}), &positions));
    const kvtable::RowsOut rows(out->data(), remember_ ? static_cast<uint64_t*>(positions->data()) : nullptr);
    const int64_t n = keys.NumElements();
    OP_REQUIRES_OK(ctx, CatchErrors("looking up", config.name, [&] {
                     const kvtable::MissingKeys missing = MissingKeysOf(mode_, config);
                     EvictedOutputs evicted(ctx, config.dim);
                     if (missing.insert) {
                       kvtable::Insertion insertion;
                       insertion.stamp = missing.stamp;
                       insertion.admission = admission_;
                       if (admission_ != 1.0f) insertion.admission_seed = NextSeed(ctx);
                       if (kEvicting) insertion.evicted = &evicted;
                       table->GatherOrInsert(keys.data(), n, rows, insertion, *threads);
                     } else {
                       table->Gather(keys.data(), n, rows, missing.missing, nullptr, 0, nullptr, *threads);
                     }
                     if (kEvicting) evicted.AllocateUnlessDone();
                   }));
  }

 private:
  tf::DataType expected_output_dtype(int i) const { return output_type(i); }

  static uint64_t NextSeed(OpKernelContext* ctx) {
    tf::core::RefCountPtr<TableResource> resource;
    return tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource).ok() ? resource->NextSeed() : 0;
  }

  std::string mode_ = "train";
  float admission_ = 1.0f;
  int64_t dim_ = 0;
  bool remember_ = false;
};

class TrainableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(3)); }
};

class StampsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    Tensor* freqs = nullptr;
    Tensor* versions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &freqs));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, keys.shape(), &versions));
    OP_REQUIRES_OK(ctx, CatchErrors("looking up", config.name, [&] {
                     table->GatherStamps(keys.data(), keys.NumElements(),
                                         static_cast<uint32_t*>(freqs->data()),
                                         static_cast<uint32_t*>(versions->data()), *threads);
                   }));
  }
};

class ScoresOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    Tensor* scores = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &scores));
    OP_REQUIRES_OK(ctx, CatchErrors("looking up", config.name, [&] {
                     table->Scores(keys.data(), keys.NumElements(), static_cast<uint64_t*>(scores->data()),
                                   *threads);
                   }));
  }
};

class UpsertOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES_OK(ctx, CheckRows(config, "rows", keys, rows, config.dim));
    OP_REQUIRES_OK(ctx, CatchErrors("writing to", config.name, [&] {
                     table->Upsert(keys.data(), keys.NumElements(), rows.data(), {1, UnixTime()}, *threads);
                   }));
  }
};

class AccumulateOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& deltas = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES_OK(ctx, CheckRows(config, "deltas", keys, deltas, config.dim));
    OP_REQUIRES_OK(ctx, CatchErrors("adding to", config.name, [&] {
                     table->Accumulate(keys.data(), keys.NumElements(), deltas.data(), false, {1, UnixTime()},
                                       *threads);
                   }));
  }
};

class RemoveOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    OP_REQUIRES_OK(ctx, CatchErrors("removing from", config.name, [&] {
                     out->scalar<int64_t>()() = table->Remove(keys.data(), keys.NumElements(), *threads);
                   }));
  }
};

class ExportOp : public TableOp {
 public:
  explicit ExportOp(OpKernelConstruction* ctx) : TableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column", &column_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("width", &width_));
  }

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    int column = 0;
    int64_t width = config.dim;
    uint64_t generation = kvtable::kAnyGeneration;
    if (!column_.empty()) {
      const auto [slots, found_in] = table->schema();
      generation = found_in;
      std::string names;
      for (size_t i = 0; i < slots.size(); ++i) {
        names += (i == 0 ? "" : ", ") + slots[i].name;
        if (slots[i].name == column_) {
          column = static_cast<int>(i) + 1;
          width = slots[i].width;
        }
      }
      OP_REQUIRES(
          ctx, column > 0,
          errors::NotFound("Key-value variable '", config.name, "' has no slot '", column_, "' yet; it has [",
                           names, "]. Slots come with the optimizer's first step."));
    }
    OP_REQUIRES(ctx, width == width_,
                errors::InvalidArgument("column '", column_, "' of key-value variable '", config.name,
                                        "' is of width ", width, ", wanted ", width_));
    Tensor keys, rows, freqs, versions;
    const std::unique_ptr<kvtable::Exporter> exporter = table->Export();
    const int64_t room = exporter->max_rows();
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(config.key_dtype, TensorShape({room}), &keys, OnHost()));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(config.value_dtype, TensorShape({room, width}), &rows, OnHost()));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tf::DT_UINT32, TensorShape({room}), &freqs, OnHost()));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tf::DT_UINT32, TensorShape({room}), &versions, OnHost()));
    int64_t n = 0;
    OP_REQUIRES_OK(
        ctx, CatchErrors("exporting", config.name, [&] {
          const int64_t key_bytes = tf::DataTypeSize(config.key_dtype);
          const int64_t row_bytes = width * tf::DataTypeSize(config.value_dtype);
          while (n < room) {
            kvtable::Exporter::Buffers out;
            out.keys = static_cast<char*>(keys.data()) + n * key_bytes;
            out.freqs = static_cast<uint32_t*>(freqs.data()) + n;
            out.versions = static_cast<uint32_t*>(versions.data()) + n;
            out.columns = {{column, static_cast<char*>(rows.data()) + n * row_bytes, width, generation}};
            const int64_t got = exporter->Next(room - n, out, *threads);
            if (got == 0) break;
            n += got;
          }
        }));
    ctx->set_output(0, keys.Slice(0, n));
    ctx->set_output(1, rows.Slice(0, n));
    ctx->set_output(2, freqs.Slice(0, n));
    ctx->set_output(3, versions.Slice(0, n));
  }

 private:
  std::string column_;
  int64_t width_ = 0;
};

class ExportSinceOp : public TableOp {
 public:
  explicit ExportSinceOp(OpKernelConstruction* ctx) : TableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
  }

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    OP_REQUIRES(
        ctx, dim_ == config.dim && output_type(0) == config.key_dtype && output_type(1) == config.value_dtype,
        errors::InvalidArgument(
            "Key-value variable '", config.name, "' has ", tf::DataTypeString(config.key_dtype),
            " keys and rows of ", tf::DataTypeString(config.value_dtype), "[", config.dim, "], wanted ",
            tf::DataTypeString(output_type(0)), " and ", tf::DataTypeString(output_type(1)), "[", dim_, "]"));
    OP_REQUIRES(ctx, tf::TensorShapeUtils::IsScalar(ctx->input(1).shape()),
                errors::InvalidArgument("KvTableExportSince wants a scalar time, got ",
                                        ctx->input(1).shape().DebugString()));
    const uint64_t since = static_cast<uint64_t>(std::max<int64_t>(0, ctx->input(1).scalar<int64_t>()()));
    std::vector<char> found_keys;
    std::vector<char> found_rows;
    OP_REQUIRES_OK(ctx, CatchErrors("exporting", config.name, [&] {
                     FindKeys(since, table, threads, &found_keys);
                     ReadRows(table, threads, &found_keys, &found_rows);
                   }));
    const int64_t n = static_cast<int64_t>(found_keys.size()) / tf::DataTypeSize(config.key_dtype);
    Tensor* keys = nullptr;
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &keys));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n, dim_}), &rows));
    std::copy(found_keys.begin(), found_keys.end(), static_cast<char*>(keys->data()));
    std::copy(found_rows.begin(), found_rows.end(), static_cast<char*>(rows->data()));
  }

 private:
  static constexpr int64_t kChunk = 65536;  // rows looked at at a time
  static constexpr uint64_t kMicroseconds = 1000000;

  static void FindKeys(uint64_t since, const kvtable::Table* table, kvtable::ParallelFor* threads,
                       std::vector<char>* found) {
    const size_t key_bytes = static_cast<size_t>(kvtable::SizeOf(table->key_type()));
    const bool has_scores = table->max_capacity() > 0 && table->eviction() != kvtable::Eviction::kCustom;
    const bool to_the_second = !has_scores || table->eviction() == kvtable::Eviction::kLfu;
    const uint64_t at_least = to_the_second ? since / kMicroseconds : since;
    std::vector<char> keys(kChunk * key_bytes);
    std::vector<uint64_t> scores(has_scores ? kChunk : 0);
    std::vector<uint32_t> versions(has_scores ? 0 : kChunk);
    kvtable::Exporter::Buffers out;
    out.keys = keys.data();
    out.scores = has_scores ? scores.data() : nullptr;
    out.versions = has_scores ? nullptr : versions.data();
    const std::unique_ptr<kvtable::Exporter> exporter = table->Export();
    for (int64_t n; (n = exporter->Next(kChunk, out, *threads)) > 0;) {
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const uint64_t touched = !has_scores     ? versions[i]
                                 : to_the_second ? static_cast<uint32_t>(scores[i])
                                                 : scores[i];
        if (touched < at_least) continue;
        found->insert(found->end(), keys.begin() + static_cast<ptrdiff_t>(i * key_bytes),
                      keys.begin() + static_cast<ptrdiff_t>((i + 1) * key_bytes));
      }
    }
  }

  // Rows that have gone meanwhile are left out, keys and all.
  static void ReadRows(const kvtable::Table* table, kvtable::ParallelFor* threads, std::vector<char>* keys,
                       std::vector<char>* rows) {
    const size_t key_bytes = static_cast<size_t>(kvtable::SizeOf(table->key_type()));
    const size_t row_bytes = static_cast<size_t>(table->dim() * kvtable::SizeOf(table->value_type()));
    const size_t n = keys->size() / key_bytes;
    rows->resize(n * row_bytes);
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(n);
    table->Gather(keys->data(), static_cast<int64_t>(n), rows->data(), kvtable::Missing::kZeros, nullptr, 0,
                  there.get(), *threads);
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!there[i]) continue;
      std::memmove(keys->data() + kept * key_bytes, keys->data() + i * key_bytes, key_bytes);
      std::memmove(rows->data() + kept * row_bytes, rows->data() + i * row_bytes, row_bytes);
      ++kept;
    }
    keys->resize(kept * key_bytes);
    rows->resize(kept * row_bytes);
  }

  int64_t dim_ = 0;
};

class SetScoresOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& scores = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES(ctx, scores.shape() == keys.shape(),
                errors::InvalidArgument("Key-value variable '", config.name,
                                        "' wants a score for each key, got ", scores.shape().DebugString(),
                                        " for keys of shape ", keys.shape().DebugString()));
    if (scores.dtype() == tf::DT_INT64) {
      const auto numbers = scores.flat<int64_t>();
      for (int64_t i = 0; i < numbers.size(); ++i) {
        OP_REQUIRES(ctx, numbers(i) >= 0,
                    errors::InvalidArgument("Key-value variable '", config.name,
                                            "' wants scores of 0 or more, got ", numbers(i)));
      }
    }
    Tensor* found = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &found));
    OP_REQUIRES_OK(ctx, CatchErrors("setting scores of", config.name, [&] {
                     found->scalar<int64_t>()() =
                         table->SetScores(keys.data(), keys.NumElements(),
                                          static_cast<const uint64_t*>(scores.data()), *threads);
                   }));
  }
};

class ImportOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Work(OpKernelContext* ctx, const TableConfig& config, kvtable::Table* table,
            kvtable::ParallelFor* threads) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckKeys(config, keys));
    OP_REQUIRES_OK(ctx, CheckRows(config, "rows", keys, rows, config.dim));
    for (int i : {3, 4}) {
      OP_REQUIRES(ctx, ctx->input(i).NumElements() == keys.NumElements(),
                  errors::InvalidArgument("Key-value variable '", config.name, "': got ", keys.NumElements(),
                                          " keys and ", ctx->input(i).NumElements(), " stamps"));
    }
    OP_REQUIRES_OK(ctx, CatchErrors("importing into", config.name, [&] {
                     table->Import(keys.data(), keys.NumElements(), {{0, rows.data()}},
                                   static_cast<const uint32_t*>(ctx->input(3).data()),
                                   static_cast<const uint32_t*>(ctx->input(4).data()), nullptr, *threads);
                   }));
  }
};

template <typename K>
class PartitionOp : public OpKernel {
 public:
  explicit PartitionOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &parts_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(0);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &out));
    const auto in = keys.flat<K>();
    auto owner = out->flat<int32_t>();
    const kvtable::PartOf<K> part_of(parts_);
    for (int64_t i = 0; i < in.size(); ++i) owner(i) = static_cast<int32_t>(part_of(in(i)));
  }

 private:
  int64_t parts_ = 1;
};

KVTOOLS_REGISTER(Name("KvTableHandle"), HandleOp);
KVTOOLS_REGISTER(Name("KvTableInitialize").HostMemory("rows"), InitializeOp);
KVTOOLS_REGISTER(Name("KvTableIsInitialized").HostMemory("initialized"), IsInitializedOp);
KVTOOLS_REGISTER(Name("KvTableSize").HostMemory("size"), SizeOp);
KVTOOLS_REGISTER(Name("KvTableMemory").HostMemory("bytes"), MemoryOp);
KVTOOLS_REGISTER(Name("KvTableZeroed"), AskOp<&kvtable::Table::Zeroed>);
KVTOOLS_REGISTER(Name("KvTableUpdateCounts")
                     .HostMemory("zeroed_rows")
                     .HostMemory("skipped_updates")
                     .HostMemory("evicted_rows"),
                 UpdateCountsOp);
KVTOOLS_REGISTER(Name("KvTableClear"), ClearOp);
KVTOOLS_REGISTER(Name("KvTableSlots"), SlotsOp);
KVTOOLS_REGISTER(Name("KvTableGather"), GatherOp<false>);
KVTOOLS_REGISTER(Name("KvTableGatherEvict"), GatherOp<true>);
KVTOOLS_REGISTER(Name("KvTableTrainable"), TrainableOp);
KVTOOLS_REGISTER(Name("KvTableContains"), AskOp<&kvtable::Table::Contains>);
KVTOOLS_REGISTER(Name("KvTableStamps"), StampsOp);
KVTOOLS_REGISTER(Name("KvTableScores"), ScoresOp);
KVTOOLS_REGISTER(Name("KvTableUpsert"), UpsertOp);
KVTOOLS_REGISTER(Name("KvTableAccumulate"), AccumulateOp);
KVTOOLS_REGISTER(Name("KvTableRemove").HostMemory("removed"), RemoveOp);
KVTOOLS_REGISTER(
    Name("KvTableExport").HostMemory("keys").HostMemory("rows").HostMemory("freqs").HostMemory("versions"),
    ExportOp);
KVTOOLS_REGISTER(Name("KvTableExportSince").HostMemory("since").HostMemory("keys").HostMemory("rows"),
                 ExportSinceOp);
KVTOOLS_REGISTER(Name("KvTableSetScores").HostMemory("keys").HostMemory("scores").HostMemory("found"),
                 SetScoresOp);
KVTOOLS_REGISTER(Name("KvTableImport"), ImportOp);
#define KVTOOLS_PARTITION(K)                                                                      \
  KVTOOLS_REGISTER(                                                                               \
      Name("KvTablePartition").TypeConstraint<K>("Tkeys").HostMemory("keys").HostMemory("owner"), \
      PartitionOp<K>)
KVTOOLS_PARTITION(int64_t);
KVTOOLS_PARTITION(int32_t);
KVTOOLS_PARTITION(uint64_t);
#undef KVTOOLS_PARTITION

}  // namespace
}  // namespace kvtools
