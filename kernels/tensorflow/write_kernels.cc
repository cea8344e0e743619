// Kernels that write rows, or what eviction goes by.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "table_kernel.h"
#include "table_metadata.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// A row that the caller writes himself must not be lost in silence.
absl::Status CheckNoPadding(OpKernelContext* ctx, OpenTable* open, const Tensor& keys) {
  const std::optional<uint64_t>& padding = open->config().policies.padding_key;
  if (!padding) return absl::OkStatus();
  const std::vector<uint64_t> wide = WidenedKeys(ctx, open->config(), keys, &open->threads);
  if (std::find(wide.begin(), wide.end(), *padding) == wide.end()) return absl::OkStatus();
  return errors::InvalidArgument(
      "Key-value variable '", open->config().name, "': key ", static_cast<int64_t>(*padding),
      " is its padding_key, which never has a row: leave it out of what is written.");
}

// Of keys that have a row now, or that are to begin anew.
void ForgetCounts(OpKernelContext* ctx, OpenTable* open, const Tensor& keys) {
  if (open->table->admitter() == nullptr) return;
  const std::vector<uint64_t> wide = WidenedKeys(ctx, open->config(), keys, &open->threads);
  open->table->admitter()->Forget(wide.data(), static_cast<int64_t>(wide.size()));
}

class UpsertOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "writing to"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "rows", keys.shape(), rows, open->config().dim));
    TF_RETURN_IF_ERROR(CheckNoPadding(ctx, open, keys));
    open->table->Upsert(keys.data(), keys.NumElements(), rows.data(), {1, UnixTime()}, open->threads);
    ForgetCounts(ctx, open, keys);
    return absl::OkStatus();
  }
};

class AccumulateOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "adding to"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& deltas = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "deltas", keys.shape(), deltas, open->config().dim));
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->resource.get(), open->table.get(), keys, &open->threads));
    open->table->Accumulate(keys.data(), keys.NumElements(), deltas.data(), false,
                            UpdateStamp(open->config(), 1), open->threads);
    return absl::OkStatus();
  }
};

class CombineOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(tf::OpKernelConstruction* ctx) override {
    std::string op;
    TF_RETURN_IF_ERROR(ctx->GetAttr("op", &op));
    op_ = op == "mul"   ? kvtable::RowOp::kMultiply
          : op == "div" ? kvtable::RowOp::kDivide
          : op == "min" ? kvtable::RowOp::kMin
                        : kvtable::RowOp::kMax;
    return absl::OkStatus();
  }

  const char* doing() const override { return "writing to"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const Tensor& keys = ctx->input(1);
    const Tensor& operands = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "operands", keys.shape(), operands, open->config().dim));
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->resource.get(), open->table.get(), keys, &open->threads));
    open->table->Combine(keys.data(), keys.NumElements(), operands.data(), op_,
                         UpdateStamp(open->config(), 1), open->threads);
    return absl::OkStatus();
  }

 private:
  kvtable::RowOp op_ = kvtable::RowOp::kMultiply;
};

class RemoveOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "removing from"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<int64_t>()() = open->table->Remove(keys.data(), keys.NumElements(), open->threads);
    ForgetCounts(ctx, open, keys);
    return absl::OkStatus();
  }
};

class SetScoresOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "setting scores of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    const Tensor& scores = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(config, keys));
    if (scores.shape() != keys.shape()) {
      return errors::InvalidArgument("Key-value variable '", config.name,
                                     "' wants a score for each key, got ", scores.shape().DebugString(),
                                     " for keys of shape ", keys.shape().DebugString());
    }
    if (scores.dtype() == tf::DT_INT64) {
      const auto numbers = scores.flat<int64_t>();
      for (int64_t i = 0; i < numbers.size(); ++i) {
        if (numbers(i) < 0) {
          return errors::InvalidArgument("Key-value variable '", config.name,
                                         "' wants scores of 0 or more, got ", numbers(i));
        }
      }
    }
    Tensor* found = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &found));
    found->scalar<int64_t>()() = open->table->SetScores(
        keys.data(), keys.NumElements(), static_cast<const uint64_t*>(scores.data()), open->threads);
    return absl::OkStatus();
  }
};

class ImportOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "importing into"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(config, keys));
    TF_RETURN_IF_ERROR(CheckRows(config, "rows", keys.shape(), rows, config.dim));
    for (int i : {3, 4}) {
      if (ctx->input(i).NumElements() == keys.NumElements()) continue;
      return errors::InvalidArgument("Key-value variable '", config.name, "': got ", keys.NumElements(),
                                     " keys and ", ctx->input(i).NumElements(), " stamps");
    }
    open->table->Import(keys.data(), keys.NumElements(), {{0, rows.data(), config.dim}},
                        static_cast<const uint32_t*>(ctx->input(3).data()),
                        static_cast<const uint32_t*>(ctx->input(4).data()), nullptr, open->threads);
    ForgetCounts(ctx, open, keys);
    return absl::OkStatus();
  }
};

class ImportColumnsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "importing into"; }

  absl::Status SetUp(tf::OpKernelConstruction* ctx) override {
    std::string json;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "slots", &json));
    slots_ = SlotsFromJson(Json::Parse(json));
    if (slots_.size() + 4 == static_cast<size_t>(num_inputs())) return absl::OkStatus();
    return errors::InvalidArgument("KvTableImportColumns wants values and a column for each slot");
  }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    const Tensor& freqs = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(config, keys));
    const int64_t n = keys.NumElements();
    if (freqs.NumElements() != n) {
      return errors::InvalidArgument("Key-value variable '", config.name, "': got ", n, " keys and ",
                                     freqs.NumElements(), " counts");
    }
    std::vector<kvtable::SlotSpec> all = open->table->slots();
    std::vector<kvtable::ColumnIn> in;
    for (size_t i = 0; i <= slots_.size(); ++i) {
      const Tensor& column = ctx->input(static_cast<int>(i) + 3);
      const int64_t width = i == 0 ? config.dim : slots_[i - 1].width;
      TF_RETURN_IF_ERROR(CheckRows(config, i == 0 ? "rows" : "slots", keys.shape(), column, width));
      size_t at = 0;
      if (i > 0) {
        while (at < all.size() && all[at].name != slots_[i - 1].name) ++at;
        if (at == all.size()) all.push_back(slots_[i - 1]);
        if (all[at].width != width) {
          return errors::InvalidArgument("Key-value variable '", config.name, "' has slot '", all[at].name,
                                         "' of width ", all[at].width, ", got width ", width);
        }
        ++at;
      }
      in.push_back({static_cast<int>(at), column.data(), width});
    }
    const uint64_t generation = open->table->EnsureSlots(all, open->threads);
    for (kvtable::ColumnIn& column : in) column.generation = generation;
    const std::vector<uint32_t> versions(static_cast<size_t>(n), UnixTime());
    open->table->Import(keys.data(), n, in, static_cast<const uint32_t*>(freqs.data()), versions.data(),
                        nullptr, open->threads);
    ForgetCounts(ctx, open, keys);
    return absl::OkStatus();
  }

 private:
  std::vector<kvtable::SlotSpec> slots_;
};

KVTOOLS_REGISTER(Name("KvTableCombine"), CombineOp);
KVTOOLS_REGISTER(Name("KvTableUpsert"), UpsertOp);
KVTOOLS_REGISTER(Name("KvTableAccumulate"), AccumulateOp);
KVTOOLS_REGISTER(Name("KvTableRemove").HostMemory("removed"), RemoveOp);
KVTOOLS_REGISTER(Name("KvTableSetScores").HostMemory("keys").HostMemory("scores").HostMemory("found"),
                 SetScoresOp);
KVTOOLS_REGISTER(Name("KvTableImport"), ImportOp);
KVTOOLS_REGISTER(Name("KvTableImportColumns").HostMemory("keys").HostMemory("freqs").HostMemory("columns"),
                 ImportColumnsOp);

}  // namespace
}  // namespace kvtools
