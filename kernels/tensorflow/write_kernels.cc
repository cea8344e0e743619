// Kernels that write rows, or what eviction goes by.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "table_kernel.h"

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
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "rows", keys, rows, open->config().dim));
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
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "deltas", keys, deltas, open->config().dim));
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->config(), open->table.get(), keys, &open->threads));
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
    TF_RETURN_IF_ERROR(CheckRows(open->config(), "operands", keys, operands, open->config().dim));
    TF_RETURN_IF_ERROR(AdmitUpdated(ctx, open->config(), open->table.get(), keys, &open->threads));
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
    TF_RETURN_IF_ERROR(CheckRows(config, "rows", keys, rows, config.dim));
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

class IncreaseCountsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "increasing the counts of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    TF_RETURN_IF_ERROR(CheckKeys(config, keys));
    if (ctx->input(2).shape() != keys.shape()) {
      return errors::InvalidArgument(
          "Key-value variable '", config.name, "' wants a count for each key, got ",
          ctx->input(2).shape().DebugString(), " for keys of shape ", keys.shape().DebugString());
    }
    const auto counts = ctx->input(2).flat<int64_t>();
    std::vector<uint32_t> by(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      if (counts(i) < 0) {
        return errors::InvalidArgument("Key-value variable '", config.name,
                                       "': counts are increased by 0 or more, got ", counts(i));
      }
      by[static_cast<size_t>(i)] = static_cast<uint32_t>(std::min<int64_t>(counts(i), UINT32_MAX));
    }
    open->table->IncreaseFrequency(keys.data(), n, by.data(), open->threads);
    if (open->table->admitter() == nullptr) return absl::OkStatus();
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(static_cast<size_t>(n));
    open->table->Contains(keys.data(), n, there.get(), open->threads);
    std::vector<uint64_t> wide = WidenedKeys(ctx, config, keys, &open->threads);
    size_t kept = 0;
    for (size_t i = 0; i < wide.size(); ++i) {
      if (there[i] || config.policies.padding_key == wide[i]) continue;
      wide[kept] = wide[i];
      by[kept++] = by[i];
    }
    open->table->admitter()->Increase(wide.data(), static_cast<int64_t>(kept), by.data());
    return absl::OkStatus();
  }
};

// Removes the rows that were last written before a moment.
class RemoveOlderOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "removing from"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    constexpr int64_t kChunk = 1 << 14;
    const int64_t before = ctx->input(1).scalar<int64_t>()();
    const size_t key_bytes = static_cast<size_t>(tf::DataTypeSize(open->config().key_dtype));
    std::vector<char> keys(kChunk * key_bytes), old;
    std::vector<uint32_t> versions(kChunk);
    const std::unique_ptr<kvtable::Exporter> exporter = open->table->Export();
    kvtable::Exporter::Buffers buffers;
    buffers.keys = keys.data();
    buffers.versions = versions.data();
    while (const int64_t n = exporter->Next(kChunk, buffers, open->threads)) {
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        if (int64_t{versions[i]} >= before) continue;
        old.insert(old.end(), &keys[i * key_bytes], &keys[i * key_bytes] + key_bytes);
      }
    }
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    const int64_t n = static_cast<int64_t>(old.size() / key_bytes);
    out->scalar<int64_t>()() = open->table->Remove(old.data(), n, open->threads);
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableIncreaseCounts").HostMemory("keys").HostMemory("counts"), IncreaseCountsOp);
KVTOOLS_REGISTER(Name("KvTableRemoveOlder").HostMemory("before").HostMemory("removed"), RemoveOlderOp);
KVTOOLS_REGISTER(Name("KvTableCombine"), CombineOp);
KVTOOLS_REGISTER(Name("KvTableUpsert"), UpsertOp);
KVTOOLS_REGISTER(Name("KvTableAccumulate"), AccumulateOp);
KVTOOLS_REGISTER(Name("KvTableRemove").HostMemory("removed"), RemoveOp);
KVTOOLS_REGISTER(Name("KvTableSetScores").HostMemory("keys").HostMemory("scores").HostMemory("found"),
                 SetScoresOp);
KVTOOLS_REGISTER(Name("KvTableImport"), ImportOp);

}  // namespace
}  // namespace kvtools
