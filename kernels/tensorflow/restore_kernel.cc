// Restores a table from a checkpoint in the layout of docs/checkpoint-layout.md, and increments of it after that, a
// chunk of rows at a time.
//
// A restore fills a new table and puts it in place when everything has been read: a checkpoint that turns out
// to be damaged leaves the variable as it was.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "catch_errors.h"
#include "errors.h"
#include "expiry.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "rows_in.h"
#include "saved_counts.h"
#include "saved_part.h"
#include "saved_rows.h"
#include "table_metadata.h"
#include "table_resource.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;

class RestoreOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::string json;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "tensor_prefix", &base_, "part_infix", &infix_, "part", &part_, "parts",
                                 &parts_, "initializer", &json, "log", &log_));
    if (part_ >= parts_) return errors::InvalidArgument("part ", part_, " is none of ", parts_, " parts");
    if (!json.empty()) own_initializer_ = InitializerFromJson(Json::Parse(json));
    return absl::OkStatus();
  }

  absl::Status Work(OpKernelContext* ctx) override {
    const auto prefixes = ctx->input(1).flat<tf::tstring>();
    if (prefixes.size() < 1) {
      return errors::InvalidArgument("KvTableRestore wants a prefix, got ",
                                     ctx->input(1).shape().DebugString());
    }
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    std::shared_ptr<kvtable::Table> table;
    std::optional<uint64_t> draws;
    bool has_padding = false;
    for (int64_t i = 0; i < prefixes.size(); ++i) {
      const std::string prefix = prefixes(i);
      TF_RETURN_IF_ERROR(CatchErrors("restoring from '" + prefix + "'", resource->config().name, [&] {
        tf::BundleReader reader(ctx->env(), prefix);
        TF_RETURN_IF_ERROR(reader.status());
        const bool is_last = i + 1 == prefixes.size();
        return i == 0 ? Restore(ctx, prefix, *resource, &reader, is_last, &table, &draws, &has_padding)
                      : ApplyIncrement(ctx, prefix, resource->config(), &reader, is_last, table.get(), &draws,
                                       &has_padding);
      }));
    }
    TF_RETURN_IF_ERROR(CatchErrors("expiring rows of", resource->config().name, [&] {
      KernelThreads threads(ctx);
      kvtable::EvictExpired(table.get(), threads);
      return absl::OkStatus();
    }));
    std::string left_out = LeftOut(resource->config(), prefixes(prefixes.size() - 1), *table, has_padding);
    if (log_ && !left_out.empty()) LOG(WARNING) << left_out;
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tf::TensorShape({}), &out));
    out->scalar<tf::tstring>()() = std::move(left_out);
    resource->set_table(std::move(table));
    if (draws) resource->set_draws(*draws);
    return absl::OkStatus();
  }

 private:
  // Which rows of the checkpoint a table does not have that was just filled from it, "" if none.
  static std::string LeftOut(const TableConfig& config, const std::string& where, const kvtable::Table& table,
                             bool has_padding) {
    std::vector<std::string> which;
    if (const int64_t n = table.EvictedCount()) {
      which.push_back(absl::StrCat(n, " beyond its max_capacity=", config.max_capacity));
    }
    if (const int64_t n = table.ExpiredCount()) which.push_back(absl::StrCat(n, " that have expired"));
    if (has_padding) {
      const uint64_t key = *config.policies.padding_key;
      which.push_back(config.key_dtype == tf::DT_UINT64
                          ? absl::StrCat("that of its padding_key, ", key)
                          : absl::StrCat("that of its padding_key, ", static_cast<int64_t>(key)));
    }
    if (which.empty()) return "";
    return absl::StrCat("Restoring '", where, "': key-value variable '", config.name,
                        "' is without rows of the checkpoint, ", absl::StrJoin(which, " and "), "; it has ",
                        table.Size(), ".");
  }

  // What new rows of the restored table start from: what the checkpoint says, else what the variable has.
  absl::Status ChooseInitializer(const TableConfig& config, const std::string& where,
                                 const TableResource& resource, const SavedPart& saved,
                                 kvtable::Initializer* initializer) const {
    if (saved.initializer) {
      *initializer = *saved.initializer;
    } else if (const std::shared_ptr<kvtable::Table> old = resource.table()) {
      *initializer = old->initializer();
    } else if (own_initializer_ && own_initializer_->kind != kvtable::Initializer::Kind::kRows) {
      *initializer = *own_initializer_;
    } else {
      return errors::FailedPrecondition(
          "Checkpoint '", where, "': table '", saved.prefix, "' has no initializer, and key-value variable '",
          config.name,
          "' has rows to draw, which it has not drawn: run its initializer (tf.global_variables_initializer) "
          "before the restore.");
    }
    return absl::OkStatus();
  }

  absl::Status Restore(OpKernelContext* ctx, const std::string& where, const TableResource& resource,
                       tf::BundleReader* reader, bool is_last, std::shared_ptr<kvtable::Table>* out,
                       std::optional<uint64_t>* draws, bool* has_padding) const {
    const TableConfig& config = resource.config();
    KernelThreads threads(ctx);
    std::vector<SavedPart> saved;
    TF_RETURN_IF_ERROR(FindSavedParts(config, where, base_, infix_, ctx->env(), reader, false, &saved));
    *draws = DrawsOf(saved);
    const SavedPart& reference = LargestPart(saved);
    kvtable::Initializer initializer;
    TF_RETURN_IF_ERROR(ChooseInitializer(config, where, resource, reference, &initializer));
    std::shared_ptr<kvtable::Table> table = resource.NewTable(initializer, threads.stream());
    table->EnsureSlots(reference.slots, threads);
    // Under the same number of parts only our own has rows for us.
    const bool same_parts = static_cast<int64_t>(saved.size()) == parts_;
    int64_t rows = 0;
    for (const SavedPart& part : saved) rows += part.rows;
    int64_t own_rows = same_parts ? saved[static_cast<size_t>(part_)].rows : rows / parts_;
    if (config.max_capacity > 0) own_rows = std::min(own_rows, config.max_capacity);
    table->Reserve(own_rows, threads);
    TF_RETURN_IF_ERROR(
        ReadRows(ctx->env(), where, config, saved, reader, is_last, table.get(), &threads, has_padding));
    *out = std::move(table);
    return absl::OkStatus();
  }

  // The keys that went, and then the rows that changed.
  absl::Status ApplyIncrement(OpKernelContext* ctx, const std::string& where, const TableConfig& config,
                              tf::BundleReader* reader, bool is_last, kvtable::Table* table,
                              std::optional<uint64_t>* draws, bool* has_padding) const {
    KernelThreads threads(ctx);
    std::vector<SavedPart> saved;
    TF_RETURN_IF_ERROR(FindSavedParts(config, where, base_, infix_, ctx->env(), reader, true, &saved));
    *draws = DrawsOf(saved);
    const SavedPart& reference = LargestPart(saved);
    if (reference.rows > 0 && !(reference.slots == table->slots())) {
      return errors::FailedPrecondition("Checkpoint '", where, "': table '", reference.prefix, "' has slots ",
                                        SlotsToJson(reference.slots),
                                        ", and the one that it is an increment of has ",
                                        SlotsToJson(table->slots()), ": it belongs to another checkpoint.");
    }
    int32_t files = 0;
    TF_RETURN_IF_ERROR(CountDataFiles(where, reader, &files));
    DataFiles data(ctx->env(), where, files);
    const bool same_parts = static_cast<int64_t>(saved.size()) == parts_;
    for (size_t p = 0; p < saved.size(); ++p) {
      if (same_parts && static_cast<int64_t>(p) != part_) continue;
      if (saved[p].removed == 0) continue;
      const StoredColumn& column = saved[p].columns.at("-removed");
      Tensor keys;
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(config.key_dtype, tf::TensorShape({saved[p].removed}), &keys, OnHost()));
      ColumnReader removed(where, &column, &data);
      TF_RETURN_IF_ERROR(removed.Read(0, saved[p].removed, static_cast<char*>(keys.data())));
      TF_RETURN_IF_ERROR(removed.Finish());
      // Keys of other parts are not there.
      table->Remove(keys.data(), saved[p].removed, threads);
    }
    return ReadRows(ctx->env(), where, config, saved, reader, is_last, table, &threads, has_padding);
  }

  // Our own rows of all parts; and what is whole in each member of a chain, where `with_counts`.
  absl::Status ReadRows(tf::Env* env, const std::string& where, const TableConfig& config,
                        const std::vector<SavedPart>& saved, tf::BundleReader* reader, bool with_counts,
                        kvtable::Table* table, kvtable::ParallelFor* threads, bool* has_padding) const {
    TakeStep(saved, table);
    TakeEpoch(saved, table);
    const bool same_parts = static_cast<int64_t>(saved.size()) == parts_;
    RowsIn rows_in(config, where, LargestPart(saved).slots, table);
    rows_in.own_part = part_;
    rows_in.own_parts = parts_;
    rows_in.all_own = same_parts;
    int32_t files = 0;
    TF_RETURN_IF_ERROR(CountDataFiles(where, reader, &files));
    DataFiles data(env, where, files);
    for (size_t p = 0; p < saved.size(); ++p) {
      if (same_parts && static_cast<int64_t>(p) != part_) continue;
      rows_in.Add(saved[p], &data);
    }
    TF_RETURN_IF_ERROR(rows_in.Read(threads));
    *has_padding = *has_padding || rows_in.has_padding();
    for (size_t p = 0; p < saved.size() && with_counts; ++p) {
      if (same_parts && static_cast<int64_t>(p) != part_) continue;
      TF_RETURN_IF_ERROR(ReadCounts(config, where, saved[p], part_, parts_, reader, table, threads));
    }
    return absl::OkStatus();
  }

  // How far the draws of this part had come: of other parts than ours, those of the one that drew most often.
  std::optional<uint64_t> DrawsOf(const std::vector<SavedPart>& saved) const {
    if (static_cast<int64_t>(saved.size()) == parts_) return saved[static_cast<size_t>(part_)].draws;
    std::optional<uint64_t> draws;
    for (const SavedPart& part : saved) draws = std::max(draws, part.draws);
    return draws;
  }

  // The step that the rows' ages are counted from.
  static void TakeStep(const std::vector<SavedPart>& saved, kvtable::Table* table) {
    if (!CountsSteps(*table)) return;
    for (const SavedPart& part : saved) {
      if (part.step && *part.step > table->Now()) table->SetStep(*part.step);
    }
  }

  // The epoch of the touches to come.
  static void TakeEpoch(const std::vector<SavedPart>& saved, kvtable::Table* table) {
    if (table->max_capacity() == 0 || !HasEpochs(table->eviction())) return;
    for (const SavedPart& part : saved) {
      if (part.epoch && *part.epoch > table->epoch()) table->SetEpoch(*part.epoch);
    }
  }

  std::string base_;
  std::string infix_;
  int64_t part_ = 0;
  int64_t parts_ = 1;
  bool log_ = true;
  std::optional<kvtable::Initializer> own_initializer_;
};

KVTOOLS_REGISTER(Name("KvTableRestore"), RestoreOp);

}  // namespace
}  // namespace kvtools
