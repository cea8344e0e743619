// Saves tables in the layout of docs/checkpoint-layout.md, a chunk of rows at a time.
//
// A save reads rows as they are when their turn comes, each whole (value, slots and stamps of one moment), and
// training goes on meanwhile.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "bundle_columns.h"
#include "catch_errors.h"
#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "row_counts.h"
#include "table_metadata.h"
#include "table_resource.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

constexpr int64_t kChunkBytes = 64 << 20;

// One column of a chunk: `width` 0 for keys and stamps.
struct Column {
  std::string tensor_name;
  tf::DataType dtype;
  int64_t width;
  Tensor rows;
};

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
    TF_RETURN_IF_ERROR(
        ReadAttrs(ctx, "tensor_prefixes", &prefixes_, "names", &names_, "part", &part_, "parts", &parts_));
    const size_t n = static_cast<size_t>(num_inputs()) - 1;
    if (prefixes_.size() == n && names_.size() == n && part_.size() == n && parts_.size() == n) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument("KvTableSave wants one prefix, name, part and parts per table");
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
    tf::BundleWriter writer(ctx->env(), prefix);
    TF_RETURN_IF_ERROR(writer.status());
    KernelThreads threads(ctx);
    RowCounts counts;
    for (size_t i = 0; i < prefixes_.size(); ++i) {
      tf::core::RefCountPtr<TableResource> resource;
      std::shared_ptr<kvtable::Table> table;
      TF_RETURN_IF_ERROR(LookupTable(ctx, static_cast<int>(i) + 1, &resource, &table));
      const TableConfig& config = resource->config();
      TF_RETURN_IF_ERROR(CatchErrors(
          "saving", config.name, [&] { return Save(ctx, i, config, *table, &threads, &writer, &counts); }));
    }
    TF_RETURN_IF_ERROR(writer.Finish());
    return SetRowCounts(ctx->env(), prefix, counts);
  }

 private:
  std::string Meta(size_t i, const TableConfig& config, const kvtable::Table& table,
                   const std::vector<kvtable::SlotSpec>& slots) const {
    return "{\"layout\": " + std::to_string(kCheckpointLayout) + ", \"name\": " + JsonQuote(names_[i]) +
           ", \"part\": " + std::to_string(part_[i]) + ", \"parts\": " + std::to_string(parts_[i]) +
           ", \"key_dtype\": " + JsonQuote(DtypeName(config.key_dtype)) +
           ", \"value_dtype\": " + JsonQuote(DtypeName(config.value_dtype)) +
           ", \"dim\": " + std::to_string(config.dim) + ", \"slots\": " + SlotsToJson(slots) +
           ", \"initializer\": " + InitializerToJson(table.initializer()) + Policies(config, table) + "}";
  }

  static std::string Policies(const TableConfig& config, const kvtable::Table& table) {
    std::string fields = config.policies.Fields();
    if (table.max_capacity() > 0) {
      fields = "\"max_capacity\": " + std::to_string(table.max_capacity()) +
               ", \"eviction\": " + JsonQuote(EvictionName(table.eviction())) + (fields.empty() ? "" : ", ") +
               fields;
    }
    return fields.empty() ? "" : ", \"policies\": {" + fields + "}";
  }

  static std::string DtypeName(tf::DataType dtype) {
    switch (dtype) {
      case tf::DT_FLOAT:
        return "float32";
      case tf::DT_HALF:
        return "float16";
      case tf::DT_DOUBLE:
        return "float64";
      default:
        return tf::DataTypeString(dtype);
    }
  }

  // Reads rows until there are `room` of them or no more, and returns how many there are.
  static int64_t ReadChunk(kvtable::Exporter* exporter, const std::vector<Column>& columns, int64_t room,
                           uint64_t generation, bool has_scores, kvtable::ParallelFor* threads) {
    const size_t slots = columns.size() - 4 - (has_scores ? 1 : 0);
    for (int64_t n = 0;;) {
      const auto at = [&](const Column& column) {
        return static_cast<char*>(column.rows.data()) +
               n * std::max<int64_t>(1, column.width) * tf::DataTypeSize(column.dtype);
      };
      kvtable::Exporter::Buffers out;
      out.keys = at(columns[0]);
      out.freqs = reinterpret_cast<uint32_t*>(at(columns[1]));
      out.versions = reinterpret_cast<uint32_t*>(at(columns[2]));
      for (size_t c = 0; c <= slots; ++c) {
        const Column& column = columns[3 + c];
        out.columns.push_back({static_cast<int>(c), at(column), column.width, generation});
      }
      if (has_scores) out.scores = reinterpret_cast<uint64_t*>(at(columns.back()));
      const int64_t got = n < room ? exporter->Next(room - n, out, *threads) : 0;
      if (got == 0) return n;
      n += got;
    }
  }

  absl::Status Save(OpKernelContext* ctx, size_t i, const TableConfig& config, const kvtable::Table& table,
                    kvtable::ParallelFor* threads, tf::BundleWriter* writer, RowCounts* counts) const {
    const std::string& x = prefixes_[i];
    const auto [slots, generation] = table.schema();
    Tensor meta(tf::DT_STRING, TensorShape({}));
    meta.scalar<tf::tstring>()() = Meta(i, config, table, slots);
    TF_RETURN_IF_ERROR(writer->Add(x + "-kvmeta", meta));
    const kvtable::Initializer initializer = table.initializer();
    if (initializer.kind == kvtable::Initializer::Kind::kRows) {
      Tensor rows;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(
          config.value_dtype, TensorShape({initializer.num_rows, config.dim}), &rows, OnHost()));
      std::memcpy(rows.data(), initializer.rows->data(), initializer.rows->size());
      TF_RETURN_IF_ERROR(writer->Add(x + "-init", rows));
    }

    std::vector<Column> columns = {{x + "-keys", config.key_dtype, 0, Tensor()},
                                   {x + "-freqs", tf::DT_UINT32, 0, Tensor()},
                                   {x + "-versions", tf::DT_UINT32, 0, Tensor()},
                                   {x + "-values", config.value_dtype, config.dim, Tensor()}};
    for (const kvtable::SlotSpec& slot : slots) {
      columns.push_back({x + "-slot-" + slot.name, config.value_dtype, slot.width, Tensor()});
    }
    const bool has_scores = table.max_capacity() > 0;
    if (has_scores) columns.push_back({x + "-scores", tf::DT_UINT64, 0, Tensor()});
    int64_t row_bytes = 0;
    for (const Column& column : columns) {
      row_bytes += std::max<int64_t>(1, column.width) * tf::DataTypeSize(column.dtype);
    }
    // Each row whole, and those that are there when their turn comes. How many there are is known at the end.
    const std::unique_ptr<kvtable::Exporter> exporter = table.Export();
    const int64_t chunk = std::min(exporter->max_rows() + 1, std::max<int64_t>(1, kChunkBytes / row_bytes));
    for (Column& column : columns) {
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(column.dtype, ColumnShape(chunk, column.width), &column.rows, OnHost()));
    }
    for (int64_t n = 0;;) {
      const int64_t rows = ReadChunk(exporter.get(), columns, chunk, generation, has_scores, threads);
      const bool is_last = rows < chunk;
      for (const Column& column : columns) {
        const Tensor chunk_rows = column.rows.Slice(0, rows);
        if (n == 0 && is_last) {
          TF_RETURN_IF_ERROR(writer->Add(column.tensor_name, chunk_rows));
        } else if (rows > 0) {
          TF_RETURN_IF_ERROR(writer->AddSlice(column.tensor_name, ColumnShape(kUncounted, column.width),
                                              RowSlice(column.width, n, rows), chunk_rows));
        }
        if (n > 0 && is_last) (*counts)[column.tensor_name] = n + rows;
      }
      if (is_last) return absl::OkStatus();
      n += rows;
    }
  }

  std::vector<std::string> prefixes_;
  std::vector<std::string> names_;
  std::vector<int64_t> part_;
  std::vector<int64_t> parts_;
};

KVTOOLS_REGISTER(Name("KvTableSave"), SaveOp);

}  // namespace
}  // namespace kvtools
