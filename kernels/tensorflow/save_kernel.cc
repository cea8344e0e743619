// Saves tables in the layout of docs/checkpoint-layout.md, a chunk of rows at a time.
//
// A save reads rows as they are when their turn comes, each whole (value, slots and stamps of one moment), and
// training goes on meanwhile.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "catch_errors.h"
#include "errors.h"
#include "expiry.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "saved_counts.h"
#include "saved_names.h"
#include "table_resource.h"
#include "table_writer.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/path.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;

// What Savers put shards into until they are merged: "<checkpoint>_kvtmp".
constexpr absl::string_view kScratch = "_kvtmp";

// The checkpoint's name without the step that a Saver puts behind it.
absl::string_view WithoutStep(absl::string_view name) {
  const size_t dash = name.find_last_of('-');
  if (dash == absl::string_view::npos || dash + 1 == name.size()) return name;
  const absl::string_view step = name.substr(dash + 1);
  return step.find_first_not_of("0123456789") == absl::string_view::npos ? name.substr(0, dash) : name;
}

// Removes the scratch folders of saves that were killed: those beside `folder`, itself one, of other steps of its Saver.
void RemoveStaleScratch(tf::Env* env, const std::string& folder) {
  absl::string_view name = tf::io::Basename(folder);
  if (!absl::ConsumeSuffix(&name, kScratch)) return;
  const std::string beside(tf::io::Dirname(folder));
  std::vector<std::string> children;
  if (!env->GetChildren(beside.empty() ? "." : beside, &children).ok()) return;
  for (const std::string& child : children) {
    absl::string_view other = child;
    if (!absl::ConsumeSuffix(&other, kScratch) || other == name || WithoutStep(other) != WithoutStep(name))
      continue;
    const std::string path = tf::io::JoinPath(beside, child);
    int64_t files = 0, folders = 0;
    LOG(WARNING) << "Removing " << path << ", left by a save that did not end";
    env->DeleteRecursively(path, &files, &folders)
        .IgnoreError();  // another device's part of this save may be faster
  }
}

class SaveOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return names_.Read(ctx, "KvTableSave", num_inputs() - 1);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    if (ctx->input(0).NumElements() != 1) {
      return errors::InvalidArgument("KvTableSave wants one prefix, got ",
                                     ctx->input(0).shape().DebugString());
    }
    const std::string prefix = ctx->input(0).flat<tf::tstring>()(0);
    const std::string folder(tf::io::Dirname(prefix));
    RemoveStaleScratch(ctx->env(), folder);
    TF_RETURN_IF_ERROR(ctx->env()->RecursivelyCreateDir(folder));
    KernelThreads threads(ctx);
    std::vector<SavedTable> tables;
    for (size_t i = 0; i < names_.size(); ++i) {
      tf::core::RefCountPtr<TableResource> resource;
      std::shared_ptr<kvtable::Table> table;
      TF_RETURN_IF_ERROR(LookupTable(ctx, static_cast<int>(i) + 1, &resource, &table));
      SavedTable saved;
      saved.config = resource->config();
      TF_RETURN_IF_ERROR(CatchErrors("expiring rows of", saved.config.name, [&] {
        ExpireBeforeSave(saved.config, table.get(), threads);
        return absl::OkStatus();
      }));
      saved.step = table->Now();
      saved.epoch = table->epoch();
      saved.draws = resource->draws();
      names_.Name(i, &saved);
      saved.schema = table->schema();
      AddCounts(saved.config, *table, &saved.more);
      saved.exporter = table->Export();
      saved.table = std::move(table);
      tables.push_back(std::move(saved));
    }
    const absl::Status written =
        WriteTables(ctx->env(), prefix, std::move(tables), threads.threads(), SavePriority::kUsual, &threads);
    if (!written.ok() && absl::EndsWith(folder, kScratch)) {  // a full disk gets its room back
      int64_t files = 0, folders = 0;
      ctx->env()->DeleteRecursively(folder, &files, &folders).IgnoreError();
    }
    return written;
  }

 private:
  SavedNames names_;
};

KVTOOLS_REGISTER(Name("KvTableSave"), SaveOp);

}  // namespace
}  // namespace kvtools
