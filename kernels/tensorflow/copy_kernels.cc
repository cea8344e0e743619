// A copy of a table, as asynchronous checkpoints take one before they write.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "errors.h"
#include "gpu.h"
#include "register_kernel.h"
#include "table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelContext;

constexpr int64_t kRowsAtATime = 1 << 14;

class CopyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> to;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &to));
    tf::core::RefCountPtr<TableResource> from;
    std::shared_ptr<kvtable::Table> table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 1, &from, &table));
    const TableConfig& config = from->config();
    OP_REQUIRES(
        ctx,
        to->config().key_dtype == config.key_dtype && to->config().value_dtype == config.value_dtype &&
            to->config().dim == config.dim,
        errors::InvalidArgument("Key-value variable '", config.name,
                                "' is copied to one of other keys or rows, '", to->config().name, "'."));
    KernelThreads threads(ctx);
    std::shared_ptr<kvtable::Table> copy;
    OP_REQUIRES_OK(ctx, CatchErrors("copying", config.name, [&] {
                     copy = to->NewTable(table->initializer(), StreamOf(ctx));
                     Copy(config, table.get(), copy.get(), &threads);
                   }));
    to->set_table(std::move(copy));
  }

 private:
  static void Copy(const TableConfig& config, kvtable::Table* from, kvtable::Table* to,
                   kvtable::ParallelFor* threads) {
    const std::vector<kvtable::SlotSpec> slots = from->slots();
    to->EnsureSlots(slots, *threads);
    const std::unique_ptr<kvtable::Exporter> exporter = from->Export();
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
      out.columns.push_back({static_cast<int>(i), columns.back().data(), width});
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

// Replaces what the table `to` holds by what `from` holds: rows with slots, stamps and scores. Rows that
// change meanwhile are copied as they were before or after, each whole.
REGISTER_OP("KvTableCopy")
    .Input("to: resource")
    .Input("from: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

KVTOOLS_REGISTER(Name("KvTableCopy"), CopyOp);

}  // namespace
}  // namespace kvtools
