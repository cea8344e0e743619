// Saves tables in the layout of docs/checkpoint-layout.md, a chunk of rows at a time.
//
// A save reads the keys first, then the rows chunk by chunk, so that each row is whole (value and slots of
// one moment) and training goes on meanwhile.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bundle_columns.h"
#include "catch_errors.h"
#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "table_metadata.h"
#include "table_resource.h"
#include "tensorflow/core/platform/env.h"
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
    TF_RETURN_IF_ERROR(ctx->env()->RecursivelyCreateDir(std::string(tf::io::Dirname(prefix))));
    tf::BundleWriter writer(ctx->env(), prefix);
    TF_RETURN_IF_ERROR(writer.status());
    KernelThreads threads(ctx);
    for (size_t i = 0; i < prefixes_.size(); ++i) {
      tf::core::RefCountPtr<TableResource> resource;
      std::shared_ptr<kvtable::Table> table;
      TF_RETURN_IF_ERROR(LookupTable(ctx, static_cast<int>(i) + 1, &resource, &table));
      const TableConfig& config = resource->config();
      TF_RETURN_IF_ERROR(CatchErrors("saving", config.name,
                                     [&] { return Save(ctx, i, config, *table, &threads, &writer); }));
    }
    return writer.Finish();
  }

 private:
  std::string Meta(size_t i, const TableConfig& config, const kvtable::Table& table,
                   const std::vector<kvtable::SlotSpec>& slots) const {
    return "{\"layout\": " + std::to_string(kCheckpointLayout) + ", \"name\": " + JsonQuote(names_[i]) +
           ", \"part\": " + std::to_string(part_[i]) + ", \"parts\": " + std::to_string(parts_[i]) +
           ", \"key_dtype\": " + JsonQuote(DtypeName(config.key_dtype)) +
           ", \"value_dtype\": " + JsonQuote(DtypeName(config.value_dtype)) +
           ", \"dim\": " + std::to_string(config.dim) + ", \"slots\": " + SlotsToJson(slots) +
           ", \"initializer\": " + InitializerToJson(table.initializer()) + Policies(table) + "}";
  }

  static std::string Policies(const kvtable::Table& table) {
    if (table.max_capacity() == 0) return "";
    return ", \"policies\": {\"max_capacity\": " + std::to_string(table.max_capacity()) +
           ", \"eviction\": " + JsonQuote(EvictionName(table.eviction())) + "}";
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

  static absl::Status ExportKeys(OpKernelContext* ctx, const TableConfig& config, const kvtable::Table& table,
                                 kvtable::ParallelFor* threads, Tensor* keys) {
    const std::unique_ptr<kvtable::Exporter> exporter = table.Export();
    const int64_t room = exporter->max_rows();
    TF_RETURN_IF_ERROR(ctx->allocate_temp(config.key_dtype, TensorShape({room}), keys, OnHost()));
    int64_t n = 0;
    while (n < room) {
      kvtable::Exporter::Buffers out;
      out.keys = static_cast<char*>(keys->data()) + n * tf::DataTypeSize(config.key_dtype);
      const int64_t got = exporter->Next(room - n, out, *threads);
      if (got == 0) break;
      n += got;
    }
    *keys = keys->Slice(0, n);
    return absl::OkStatus();
  }

  absl::Status Save(OpKernelContext* ctx, size_t i, const TableConfig& config, const kvtable::Table& table,
                    kvtable::ParallelFor* threads, tf::BundleWriter* writer) const {
    const std::string& x = prefixes_[i];
    const std::vector<kvtable::SlotSpec> slots = table.slots();
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

    Tensor keys;
    TF_RETURN_IF_ERROR(ExportKeys(ctx, config, table, threads, &keys));
    const int64_t n = keys.dim_size(0);
    std::vector<Column> columns = {{x + "-keys", config.key_dtype, 0, Tensor()},
                                   {x + "-freqs", tf::DT_UINT32, 0, Tensor()},
                                   {x + "-versions", tf::DT_UINT32, 0, Tensor()},
                                   {x + "-values", config.value_dtype, config.dim, Tensor()}};
    for (const kvtable::SlotSpec& slot : slots) {
      columns.push_back({x + "-slot-" + slot.name, config.value_dtype, slot.width, Tensor()});
    }
    const size_t last_column = 3 + slots.size();
    const bool has_scores = table.max_capacity() > 0;
    if (has_scores) columns.push_back({x + "-scores", tf::DT_UINT64, 0, Tensor()});
    int64_t row_bytes = 0;
    for (const Column& column : columns) {
      row_bytes += std::max<int64_t>(1, column.width) * tf::DataTypeSize(column.dtype);
    }
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / row_bytes);
    const bool whole = n <= chunk;
    for (int64_t start = 0; start < n || (start == 0 && whole); start += chunk) {
      const int64_t rows = std::min(chunk, n - start);
      const Tensor chunk_keys = keys.Slice(start, start + rows);
      std::vector<kvtable::ColumnOut> out;
      for (size_t c = 0; c < columns.size(); ++c) {
        Column& column = columns[c];
        TF_RETURN_IF_ERROR(
            ctx->allocate_temp(column.dtype, ColumnShape(rows, column.width), &column.rows, OnHost()));
        if (c >= 3 && c <= last_column)
          out.push_back({static_cast<int>(c) - 3, column.rows.data(), column.width});
      }
      std::memcpy(columns[0].rows.data(), chunk_keys.data(), chunk_keys.TotalBytes());
      table.GatherStamps(columns[0].rows.data(), rows, static_cast<uint32_t*>(columns[1].rows.data()),
                         static_cast<uint32_t*>(columns[2].rows.data()), *threads);
      table.GatherColumns(columns[0].rows.data(), rows, out, nullptr, *threads);
      if (has_scores) {
        table.Scores(columns[0].rows.data(), rows, static_cast<uint64_t*>(columns.back().rows.data()),
                     *threads);
      }
      for (const Column& column : columns) {
        if (whole) {
          TF_RETURN_IF_ERROR(writer->Add(column.tensor_name, column.rows));
        } else {
          TF_RETURN_IF_ERROR(writer->AddSlice(column.tensor_name, ColumnShape(n, column.width),
                                              RowSlice(column.width, start, rows), column.rows));
        }
      }
      if (whole) break;
    }
    return absl::OkStatus();
  }

  std::vector<std::string> prefixes_;
  std::vector<std::string> names_;
  std::vector<int64_t> part_;
  std::vector<int64_t> parts_;
};

KVTOOLS_REGISTER(Name("KvTableSave"), SaveOp);

}  // namespace
}  // namespace kvtools
