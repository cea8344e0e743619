// Kernels that follow a table's changes, and that take what it is at one moment and write it later.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "expiry.h"
#include "saved_counts.h"
#include "saved_names.h"
#include "table_cuts.h"
#include "table_kernel.h"
#include "table_writer.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/path.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// A version of a table, as an op has it. Versions are numbers that no two tables have in common.
constexpr int64_t kNone = -1;

absl::Status ReadMark(OpKernelContext* ctx, int input, int64_t* version) {
  const Tensor& mark = ctx->input(input);
  if (mark.NumElements() != 2) {
    return errors::InvalidArgument("A mark has 2 numbers, got ", mark.shape().DebugString());
  }
  *version = mark.flat<int64_t>()(1);
  return absl::OkStatus();
}

class TrackChangesOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "tracking the changes of"; }

  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "max_removed", &max_removed_);
  }

  absl::Status WorkOn(OpKernelContext*, OpenTable* open) override {
    open->table->TrackChanges(max_removed_);
    return absl::OkStatus();
  }

 private:
  int64_t max_removed_ = 0;
};

class ChangesKnownOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "asking for the changes of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    int64_t since = kNone;
    TF_RETURN_IF_ERROR(ReadMark(ctx, 1, &since));
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tf::tstring>()() = since == kNone ? "The mark is of a table whose changes were not tracked."
                                                  : open->table->ChangesLost(static_cast<uint64_t>(since));
    return absl::OkStatus();
  }
};

class CutOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "taking the rows of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor *number = nullptr, *at = nullptr;
    int64_t since = kNone;
    TF_RETURN_IF_ERROR(ReadMark(ctx, 1, &since));
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &number));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({2}), &at));
    Cut cut;
    cut.is_increment = since != kNone;
    ExpireBeforeSave(open->config(), open->table.get(), open->threads);
    cut.step = open->table->Now();
    cut.epoch = open->table->epoch();
    cut.draws = open->resource->draws();
    AddCounts(open->config(), *open->table, &cut.more);  // before the rows
    kvtable::MomentOptions options;
    options.cut = open->table->tracks_changes();
    if (cut.is_increment) options.since = static_cast<uint64_t>(since);
    cut.exporter = open->table->ExportMoment(options);
    // Does not change while the export is open (on a GPU, where it may, the writing fails then).
    cut.schema = open->table->schema();
    const uint64_t version = cut.exporter->version();
    cut.table = open->table;
    at->vec<int64_t>()(0) = version == 0 ? kNone : 0;
    at->vec<int64_t>()(1) = version == 0 ? kNone : static_cast<int64_t>(version);
    number->scalar<int64_t>()() = open->resource->cuts()->Add(std::move(cut));
    return absl::OkStatus();
  }
};

class DropCutOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    if (ctx->input(1).NumElements() != 1) {
      return errors::InvalidArgument("KvTableDropCut wants one cut, got ",
                                     ctx->input(1).shape().DebugString());
    }
    Cut cut;
    resource->cuts()->Take(ctx->input(1).flat<int64_t>()(0), &cut);
    return absl::OkStatus();
  }
};

class ForgetChangesOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "forgetting the changes of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    int64_t upto = kNone;
    TF_RETURN_IF_ERROR(ReadMark(ctx, 1, &upto));
    if (upto != kNone) open->table->ForgetChanges(static_cast<uint64_t>(upto));
    return absl::OkStatus();
  }
};

class SaveCutOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return names_.Read(ctx, "KvTableSaveCut", num_inputs() - 2);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    const size_t n = names_.size();
    const Tensor& numbers = ctx->input(num_inputs() - 1);
    if (ctx->input(0).NumElements() != 1 || numbers.NumElements() != static_cast<int64_t>(n)) {
      return errors::InvalidArgument("KvTableSaveCut wants one prefix and ", n, " cuts, got ",
                                     ctx->input(0).shape().DebugString(), " and ",
                                     numbers.shape().DebugString());
    }
    // All are taken first: what fails here gives up the others, too.
    absl::Status status;
    std::vector<Cut> cuts(n);
    std::vector<SavedTable> tables(n);
    for (size_t i = 0; i < n; ++i) {
      tf::core::RefCountPtr<TableResource> resource;
      const absl::Status found =
          tf::LookupResource(ctx, tf::HandleFromInput(ctx, static_cast<int>(i) + 1), &resource);
      const int64_t number = numbers.flat<int64_t>()(static_cast<int64_t>(i));
      if (!found.ok()) {
        status.Update(found);
      } else if (!resource->cuts()->Take(number, &cuts[i])) {
        status.Update(errors::FailedPrecondition("Key-value variable '", resource->config().name,
                                                 "' has no cut ", number,
                                                 ": it was saved or dropped already. Take another."));
      } else {
        tables[i].config = resource->config();
      }
    }
    TF_RETURN_IF_ERROR(status);

    const std::string prefix = ctx->input(0).flat<tf::tstring>()(0);
    TF_RETURN_IF_ERROR(ctx->env()->RecursivelyCreateDir(std::string(tf::io::Dirname(prefix))));
    std::vector<SavedCounts> counts(n);
    for (size_t i = 0; i < n; ++i) {
      SavedTable& saved = tables[i];
      names_.Name(i, &saved);
      saved.schema = std::move(cuts[i].schema);
      saved.is_increment = cuts[i].is_increment;
      saved.step = cuts[i].step;
      saved.epoch = cuts[i].epoch;
      saved.draws = cuts[i].draws;
      saved.more = std::move(cuts[i].more);
      saved.counts = &counts[i];
      saved.concurrent = saved.config.gpu == nullptr;  // a GPU's table is read on one stream
      saved.exporter = std::move(cuts[i].exporter);
      saved.table = std::move(cuts[i].table);
    }
    KernelThreads threads(ctx);
    TF_RETURN_IF_ERROR(WriteTables(ctx->env(), prefix, std::move(tables), threads.threads(),
                                   SavePriority::kBeside, &threads));
    Tensor* out[3];
    for (int o = 0; o < 3; ++o) {
      TF_RETURN_IF_ERROR(ctx->allocate_output(o, TensorShape({static_cast<int64_t>(n)}), &out[o]));
    }
    for (size_t i = 0; i < n; ++i) {
      const int64_t at = static_cast<int64_t>(i);
      out[0]->vec<int64_t>()(at) = counts[i].rows;
      out[1]->vec<int64_t>()(at) = counts[i].removed;
      out[2]->vec<int64_t>()(at) = counts[i].born;
    }
    return absl::OkStatus();
  }

 private:
  SavedNames names_;
};

KVTOOLS_REGISTER(Name("KvTableTrackChanges"), TrackChangesOp);
KVTOOLS_REGISTER(Name("KvTableChangesKnown").HostMemory("since").HostMemory("why"), ChangesKnownOp);
KVTOOLS_REGISTER(Name("KvTableCut").HostMemory("since").HostMemory("cut").HostMemory("at"), CutOp);
KVTOOLS_REGISTER(Name("KvTableSaveCut")
                     .HostMemory("prefix")
                     .HostMemory("cuts")
                     .HostMemory("rows")
                     .HostMemory("removed")
                     .HostMemory("born"),
                 SaveCutOp);
KVTOOLS_REGISTER(Name("KvTableDropCut").HostMemory("cut"), DropCutOp);
KVTOOLS_REGISTER(Name("KvTableForgetChanges").HostMemory("upto"), ForgetChangesOp);

}  // namespace
}  // namespace kvtools
