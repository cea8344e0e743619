// Kernels of how often keys came, and of rows that go by when they were written.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "errors.h"
#include "expiry.h"
#include "table_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// Frequencies of rows, and how often keys came that have none yet.
class CountsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "counting keys of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, keys.shape(), &out));
    const int64_t n = keys.NumElements();
    const auto counts = out->flat<uint32_t>();
    open->table->GatherStamps(keys.data(), n, counts.data(), nullptr, open->threads);
    if (open->table->admitter() == nullptr) return absl::OkStatus();
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(static_cast<size_t>(n));
    open->table->Contains(keys.data(), n, there.get(), open->threads);
    const std::vector<uint64_t> wide = WidenedKeys(ctx, open->config(), keys, &open->threads);
    std::vector<uint32_t> waiting(wide.size());
    open->table->admitter()->Counts(wide.data(), n, waiting.data());
    for (int64_t i = 0; i < n; ++i) {
      if (!there[static_cast<size_t>(i)]) counts(i) = waiting[static_cast<size_t>(i)];
    }
    return absl::OkStatus();
  }
};

// Keys, those without a row included, and the sum of their frequencies and counts.
class TotalsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "counting keys of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    constexpr int64_t kChunk = 1 << 14;
    int64_t keys = 0;
    uint64_t total = 0;
    const std::shared_ptr<kvtable::Admitter>& admitter = open->table->admitter();
    if (admitter != nullptr) {
      keys = admitter->waiting();
      total = admitter->total_count();
    }
    std::vector<uint32_t> freqs(kChunk);
    const std::unique_ptr<kvtable::Exporter> exporter = open->table->Export();
    kvtable::Exporter::Buffers buffers;
    buffers.freqs = freqs.data();
    while (const int64_t n = exporter->Next(kChunk, buffers, open->threads)) {
      keys += n;
      for (int64_t i = 0; i < n; ++i) total += freqs[static_cast<size_t>(i)];
    }
    const int64_t answers[] = {keys, static_cast<int64_t>(total)};
    for (int i = 0; i < 2; ++i) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, TensorShape({}), &out));
      out->scalar<int64_t>()() = answers[i];
    }
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
    if (CountsSteps(*open->table)) {
      return errors::FailedPrecondition(
          "Key-value variable '", open->config().name,
          "' stamps rows with steps, for they expire by steps: it does not know "
          "their days. Evict by tfplugin.policies.ExpireAfterSteps.");
    }
    const int64_t before = ctx->input(1).scalar<int64_t>()();
    kvtable::RowTest test;
    test.written_before = static_cast<uint32_t>(std::clamp<int64_t>(before, 0, UINT32_MAX));
    kvtable::PassCursor cursor;
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<int64_t>()() = open->table->EvictSlice(test, &cursor, kvtable::kAllRows, open->threads);
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableIncreaseCounts").HostMemory("keys").HostMemory("counts"), IncreaseCountsOp);
KVTOOLS_REGISTER(Name("KvTableRemoveOlder").HostMemory("before").HostMemory("removed"), RemoveOlderOp);
KVTOOLS_REGISTER(Name("KvTableCounts").HostMemory("keys").HostMemory("counts"), CountsOp);
KVTOOLS_REGISTER(Name("KvTableTotals").HostMemory("keys").HostMemory("frequencies"), TotalsOp);

}  // namespace
}  // namespace kvtools
