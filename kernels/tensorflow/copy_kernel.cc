// A copy of a table, as asynchronous checkpoints take one before they write.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "catch_errors.h"
#include "errors.h"
#include "expiry.h"
#include "gpu.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "table_resource.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelContext;

constexpr int64_t kRowsAtATime = 1 << 14;

class CopyOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> to;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &to));
    tf::core::RefCountPtr<TableResource> from;
    std::shared_ptr<kvtable::Table> table;
    TF_RETURN_IF_ERROR(LookupTable(ctx, 1, &from, &table));
    const TableConfig& config = from->config();
    if (to->config().key_dtype != config.key_dtype || to->config().value_dtype != config.value_dtype ||
        to->config().dim != config.dim) {
      return errors::InvalidArgument("Key-value variable '", config.name,
                                     "' is copied to one of other keys or rows, '", to->config().name, "'.");
    }
    return CatchErrors("copying", config.name, [&] {
      KernelThreads threads(ctx);
      std::shared_ptr<kvtable::Table> copy = to->NewTable(table->initializer(), StreamOf(ctx));
      if (CountsSteps(*table) && CountsSteps(*copy)) copy->SetStep(table->Now());
      Copy(config, table.get(), copy.get(), &threads);
      CopyCounts(*table, copy.get());
      to->set_table(std::move(copy));
      return absl::OkStatus();
    });
  }

 private:
  // Of keys that wait to be admitted.
  static void CopyCounts(const kvtable::Table& from, kvtable::Table* to) {
    if (from.admitter() == nullptr || to->admitter() == nullptr) return;
    std::vector<uint64_t> keys;
    std::vector<uint32_t> counts;
    from.admitter()->Waiting(&keys, &counts);
    to->admitter()->Increase(keys.data(), static_cast<int64_t>(keys.size()), counts.data());
    const std::vector<char> filter = from.admitter()->Filter();
    if (!filter.empty()) to->admitter()->MergeFilter(filter.data(), static_cast<int64_t>(filter.size()));
  }

  static void Copy(const TableConfig& config, kvtable::Table* from, kvtable::Table* to,
                   kvtable::ParallelFor* threads) {
    const std::unique_ptr<kvtable::Exporter> exporter = from->ExportMoment({});
    const auto [slots, generation] = from->schema();  // does not change while the export is open
    to->EnsureSlots(slots, *threads);
    const auto rows = static_cast<size_t>(std::min<int64_t>(kRowsAtATime, exporter->max_rows()));
    if (rows == 0) return;
    const auto element = static_cast<size_t>(tf::DataTypeSize(config.value_dtype));

    std::vector<char> keys(rows * static_cast<size_t>(tf::DataTypeSize(config.key_dtype)));
    std::vector<uint32_t> freqs(rows), versions(rows);
    std::vector<uint64_t> scores(rows);
    std::vector<std::vector<char>> columns;
    kvtable::Exporter::Buffers out;
    std::vector<kvtable::ColumnIn> in;
    columns.reserve(slots.size() + 1);
    for (size_t i = 0; i <= slots.size(); ++i) {
      const int64_t width = i == 0 ? config.dim : slots[i - 1].width;
      columns.emplace_back(rows * static_cast<size_t>(width) * element);
      out.columns.push_back({static_cast<int>(i), columns.back().data(), width, generation});
      in.push_back({static_cast<int>(i), columns.back().data(), width});
    }
    out.keys = keys.data();
    out.freqs = freqs.data();
    out.versions = versions.data();
    out.scores = scores.data();
    while (const int64_t n = exporter->Next(static_cast<int64_t>(rows), out, *threads)) {
      to->Import(keys.data(), n, in, freqs.data(), versions.data(), scores.data(), *threads);
    }
  }
};

KVTOOLS_REGISTER(Name("KvTableCopy"), CopyOp);

}  // namespace
}  // namespace kvtools
