// Restores a table from a checkpoint in the layout of docs/checkpoint-layout.md, a chunk of rows at a time.
//
// A restore fills a new table and puts it in place when everything has been read: a checkpoint that turns out
// to be damaged leaves the variable as it was.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bundle_columns.h"
#include "catch_errors.h"
#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/part_of.h"
#include "saved_part.h"
#include "table_metadata.h"
#include "table_resource.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class RestoreOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::string json;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "tensor_prefix", &base_, "part_infix", &infix_, "part", &part_, "parts",
                                 &parts_, "initializer", &json));
    if (part_ >= parts_) return errors::InvalidArgument("part ", part_, " is none of ", parts_, " parts");
    if (!json.empty()) own_initializer_ = InitializerFromJson(Json::Parse(json));
    return absl::OkStatus();
  }

  absl::Status Work(OpKernelContext* ctx) override {
    if (ctx->input(1).NumElements() != 1) {
      return errors::InvalidArgument("KvTableRestore wants one prefix, got ",
                                     ctx->input(1).shape().DebugString());
    }
    const std::string prefix = ctx->input(1).flat<tf::tstring>()(0);
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    return CatchErrors("restoring from '" + prefix + "'", resource->config().name, [&] {
      tf::BundleReader reader(ctx->env(), prefix);
      TF_RETURN_IF_ERROR(reader.status());
      std::shared_ptr<kvtable::Table> table;
      TF_RETURN_IF_ERROR(Restore(ctx, prefix, *resource, &reader, &table));
      resource->set_table(std::move(table));
      return absl::OkStatus();
    });
  }

 private:
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

  // Rows [start, start + length) of a column, from a tensor stored whole or in slices.
  static absl::Status ReadColumn(OpKernelContext* ctx, tf::BundleReader* reader, const std::string& name,
                                 tf::DataType dtype, int64_t rows, int64_t width, int64_t start,
                                 int64_t length, std::map<std::string, Tensor>* whole, Tensor* out) {
    if (length == rows) {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype, ColumnShape(rows, width), out, OnHost()));
      return reader->Lookup(name, out);
    }
    std::vector<tf::TensorSlice> slices;
    TF_RETURN_IF_ERROR(reader->LookupTensorSlices(name, &slices));
    if (!slices.empty()) {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype, ColumnShape(length, width), out, OnHost()));
      return reader->LookupSlice(name, RowSlice(width, start, length), out);
    }
    auto it = whole->find(name);
    if (it == whole->end()) {
      Tensor all;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype, ColumnShape(rows, width), &all, OnHost()));
      TF_RETURN_IF_ERROR(reader->Lookup(name, &all));
      it = whole->emplace(name, std::move(all)).first;
    }
    *out = it->second.Slice(start, start + length);
    return absl::OkStatus();
  }

  template <typename K>
  std::vector<int64_t> OwnRows(const Tensor& keys) const {
    std::vector<int64_t> own;
    const auto in = keys.flat<K>();
    const kvtable::PartOf<K> part_of(parts_);
    for (int64_t i = 0; i < in.size(); ++i) {
      if (part_of(in(i)) == part_) own.push_back(i);
    }
    return own;
  }

  // Keeps rows `own` of a column.
  static absl::Status Compact(OpKernelContext* ctx, const std::vector<int64_t>& own, int64_t width,
                              Tensor* rows) {
    const int64_t bytes = std::max<int64_t>(1, width) * tf::DataTypeSize(rows->dtype());
    Tensor kept;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(rows->dtype(), ColumnShape(static_cast<int64_t>(own.size()), width),
                                          &kept, OnHost()));
    char* to = static_cast<char*>(kept.data());
    const char* from = static_cast<const char*>(rows->data());
    for (size_t i = 0; i < own.size(); ++i) std::memcpy(to + i * bytes, from + own[i] * bytes, bytes);
    *rows = std::move(kept);
    return absl::OkStatus();
  }

  absl::Status Restore(OpKernelContext* ctx, const std::string& where, const TableResource& resource,
                       tf::BundleReader* reader, std::shared_ptr<kvtable::Table>* out) const {
    const TableConfig& config = resource.config();
    KernelThreads threads(ctx);
    std::vector<SavedPart> saved;
    TF_RETURN_IF_ERROR(FindSavedParts(config, where, base_, infix_, ctx->env(), reader, &saved));
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
    for (size_t p = 0; p < saved.size(); ++p) {
      if (same_parts && static_cast<int64_t>(p) != part_) continue;
      TF_RETURN_IF_ERROR(RestorePart(ctx, config, where, saved[p], reference.slots, same_parts, reader,
                                     table.get(), &threads));
    }
    *out = std::move(table);
    return absl::OkStatus();
  }

  // Imports the rows of a part that are our own: all of them, where `all_own`.
  absl::Status RestorePart(OpKernelContext* ctx, const TableConfig& config, const std::string& where,
                           const SavedPart& part, const std::vector<kvtable::SlotSpec>& slots, bool all_own,
                           tf::BundleReader* reader, kvtable::Table* table,
                           kvtable::ParallelFor* threads) const {
    // Scores of another kind are of no use here: the table starts from stamps then.
    const bool with_scores =
        config.max_capacity > 0 && part.has_scores && part.eviction == EvictionName(config.eviction);
    std::map<std::string, Tensor> whole;
    for (const auto& [start, length] : part.chunks) {
      const auto read = [&, start = start, length = length](const std::string& column, tf::DataType dtype,
                                                            int64_t width, Tensor* rows) {
        const std::string name = part.prefix + column;
        return ReadError(where, name,
                         ReadColumn(ctx, reader, name, dtype, part.rows, width, start, length, &whole, rows));
      };
      Tensor keys, freqs, versions, scores;
      TF_RETURN_IF_ERROR(read("-keys", config.key_dtype, 0, &keys));
      if (part.has_freqs) TF_RETURN_IF_ERROR(read("-freqs", tf::DT_UINT32, 0, &freqs));
      if (part.has_versions) TF_RETURN_IF_ERROR(read("-versions", tf::DT_UINT32, 0, &versions));
      if (with_scores) TF_RETURN_IF_ERROR(read("-scores", tf::DT_UINT64, 0, &scores));
      std::vector<Tensor> columns(slots.size() + 1);
      TF_RETURN_IF_ERROR(read("-values", config.value_dtype, config.dim, &columns[0]));
      for (size_t s = 0; s < slots.size(); ++s) {
        TF_RETURN_IF_ERROR(
            read("-slot-" + slots[s].name, config.value_dtype, slots[s].width, &columns[s + 1]));
      }
      const auto width_of = [&](size_t column) { return column == 0 ? config.dim : slots[column - 1].width; };
      const std::vector<int64_t> own = config.key_dtype == tf::DT_INT32    ? OwnRows<int32_t>(keys)
                                       : config.key_dtype == tf::DT_UINT64 ? OwnRows<uint64_t>(keys)
                                                                           : OwnRows<int64_t>(keys);
      const int64_t others = keys.NumElements() - static_cast<int64_t>(own.size());
      if (others > 0 && all_own) {
        return Damaged(where, part.prefix + "-keys", "has ", others, " keys that belong to other parts");
      }
      if (others > 0) {
        TF_RETURN_IF_ERROR(Compact(ctx, own, 0, &keys));
        if (part.has_freqs) TF_RETURN_IF_ERROR(Compact(ctx, own, 0, &freqs));
        if (part.has_versions) TF_RETURN_IF_ERROR(Compact(ctx, own, 0, &versions));
        if (with_scores) TF_RETURN_IF_ERROR(Compact(ctx, own, 0, &scores));
        for (size_t s = 0; s < columns.size(); ++s) {
          TF_RETURN_IF_ERROR(Compact(ctx, own, width_of(s), &columns[s]));
        }
      }
      std::vector<kvtable::ColumnIn> in;
      for (size_t s = 0; s < columns.size(); ++s) {
        in.push_back({static_cast<int>(s), columns[s].data(), width_of(s)});
      }
      table->Import(keys.data(), keys.NumElements(), in,
                    part.has_freqs ? static_cast<const uint32_t*>(freqs.data()) : nullptr,
                    part.has_versions ? static_cast<const uint32_t*>(versions.data()) : nullptr,
                    with_scores ? static_cast<const uint64_t*>(scores.data()) : nullptr, *threads);
    }
    return absl::OkStatus();
  }

  std::string base_;
  std::string infix_;
  int64_t part_ = 0;
  int64_t parts_ = 1;
  std::optional<kvtable::Initializer> own_initializer_;
};

KVTOOLS_REGISTER(Name("KvTableRestore"), RestoreOp);

}  // namespace
}  // namespace kvtools
