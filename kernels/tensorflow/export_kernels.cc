// Kernels that read a table whole, or in pieces.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "expiry.h"
#include "table_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// A column of a table's rows, found by name.
struct FoundColumn {
  int number = 0;
  int64_t width = 0;
  uint64_t generation = kvtable::kAnyGeneration;  // of the table's slots when it was found
};

// `name` is a slot's, or empty for the value; `width` is what the op was built for.
absl::Status FindColumn(const TableConfig& config, const kvtable::Table& table, const std::string& name,
                        int64_t width, FoundColumn* found) {
  *found = FoundColumn();
  found->width = config.dim;
  if (!name.empty()) {
    const auto [slots, generation] = table.schema();
    std::string names;
    for (size_t i = 0; i < slots.size(); ++i) {
      names += (i == 0 ? "" : ", ") + slots[i].name;
      if (slots[i].name == name) *found = {static_cast<int>(i) + 1, slots[i].width, generation};
    }
    if (found->number == 0) {
      return errors::NotFound("Key-value variable '", config.name, "' has no slot '", name, "' yet; it has [",
                              names, "]. Slots come with the optimizer's first step.");
    }
  }
  if (found->width == width) return absl::OkStatus();
  return errors::InvalidArgument("column '", name, "' of key-value variable '", config.name, "' is of width ",
                                 found->width, ", wanted ", width);
}

// That rows of the variable may be taken for those of an output.
absl::Status CheckValueType(const TableConfig& config, tf::DataType output) {
  if (output == config.value_dtype) return absl::OkStatus();
  return errors::InvalidArgument("Key-value variable '", config.name, "' has ",
                                 tf::DataTypeString(config.value_dtype), " rows, wanted ",
                                 tf::DataTypeString(output));
}

// A column of an export, in host memory, that is made longer while it is read.
class GrowingColumn {
 public:
  // `width` 0 for keys and stamps.
  GrowingColumn(tf::DataType dtype, int64_t width)
      : dtype_(dtype), width_(width), row_bytes_(std::max<int64_t>(1, width) * tf::DataTypeSize(dtype)) {}

  // Gives it room for `room` rows, of which the first `rows` stay.
  absl::Status Grow(OpKernelContext* ctx, int64_t rows, int64_t room) {
    TensorShape shape({room});
    if (width_ > 0) TF_RETURN_IF_ERROR(shape.AddDimWithStatus(width_));
    Tensor grown;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype_, shape, &grown, OnHost()));
    if (rows > 0) std::memcpy(grown.data(), column_.data(), static_cast<size_t>(rows * row_bytes_));
    column_ = std::move(grown);
    return absl::OkStatus();
  }

  char* at(int64_t row) const { return static_cast<char*>(column_.data()) + row * row_bytes_; }
  Tensor First(int64_t rows) const { return column_.Slice(0, rows); }

 private:
  tf::DataType dtype_;
  int64_t width_;
  int64_t row_bytes_;
  Tensor column_;
};

// Reads all rows of a table, into `columns` from row `*n` on, where `out()` says. A table of a GPU may have got
// more of them than were counted at the start by the time that it is read to the end.
template <class Out>
absl::Status ReadAll(OpKernelContext* ctx, OpenTable* open, const std::vector<GrowingColumn*>& columns,
                     int64_t* n, const Out& out) {
  kvtable::EvictExpired(open->table.get(), open->threads);
  const std::unique_ptr<kvtable::Exporter> exporter = open->table->Export();
  for (int64_t room = exporter->max_rows() + 1;; room += room / 2 + 1) {
    for (GrowingColumn* column : columns) TF_RETURN_IF_ERROR(column->Grow(ctx, *n, room));
    while (*n < room) {
      const int64_t got = exporter->Next(room - *n, out(), open->threads);
      if (got == 0) return absl::OkStatus();
      *n += got;
    }
  }
}

class ExportOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "column", &column_, "width", &width_);
  }

  const char* doing() const override { return "exporting"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    FoundColumn column;
    TF_RETURN_IF_ERROR(CheckKeyType(config, output_type(0)));
    TF_RETURN_IF_ERROR(CheckValueType(config, output_type(1)));
    TF_RETURN_IF_ERROR(FindColumn(config, *open->table, column_, width_, &column));
    GrowingColumn keys(config.key_dtype, 0);
    GrowingColumn rows(config.value_dtype, width_);
    GrowingColumn freqs(tf::DT_UINT32, 0);
    GrowingColumn versions(tf::DT_UINT32, 0);
    int64_t n = 0;
    TF_RETURN_IF_ERROR(ReadAll(ctx, open, {&keys, &rows, &freqs, &versions}, &n, [&] {
      kvtable::Exporter::Buffers out;
      out.keys = keys.at(n);
      out.freqs = reinterpret_cast<uint32_t*>(freqs.at(n));
      out.versions = reinterpret_cast<uint32_t*>(versions.at(n));
      out.columns = {{column.number, rows.at(n), width_, column.generation}};
      return out;
    }));
    ctx->set_output(0, keys.First(n));
    ctx->set_output(1, rows.First(n));
    ctx->set_output(2, freqs.First(n));
    ctx->set_output(3, versions.First(n));
    return absl::OkStatus();
  }

 private:
  std::string column_;
  int64_t width_ = 0;
};

class KeysOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "listing the keys of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    TF_RETURN_IF_ERROR(CheckKeyType(config, output_type(0)));
    GrowingColumn keys(config.key_dtype, 0);
    int64_t n = 0;
    TF_RETURN_IF_ERROR(ReadAll(ctx, open, {&keys}, &n, [&] {
      kvtable::Exporter::Buffers out;
      out.keys = keys.at(n);
      return out;
    }));
    ctx->set_output(0, keys.First(n));
    return absl::OkStatus();
  }
};

// That an input is a vector of the variable's keys.
absl::Status CheckKeyVector(const TableConfig& config, const Tensor& keys) {
  if (keys.dtype() == config.key_dtype && keys.dims() == 1) return absl::OkStatus();
  return errors::InvalidArgument("Key-value variable '", config.name, "' wants keys [n] of ",
                                 tf::DataTypeString(config.key_dtype), ", got ",
                                 tf::DataTypeString(keys.dtype()), keys.shape().DebugString());
}

class ReadColumnOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "column", &column_, "width", &width_);
  }

  const char* doing() const override { return "reading"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeyVector(config, keys));
    FoundColumn column;
    TF_RETURN_IF_ERROR(CheckValueType(config, output_type(0)));
    TF_RETURN_IF_ERROR(FindColumn(config, *open->table, column_, width_, &column));
    TensorShape shape = keys.shape();
    TF_RETURN_IF_ERROR(shape.AddDimWithStatus(width_));
    Tensor* rows = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &rows));
    open->table->GatherColumns(keys.data(), keys.NumElements(),
                               {{column.number, rows->data(), width_, column.generation}}, nullptr,
                               open->threads);
    return absl::OkStatus();
  }

 private:
  std::string column_;
  int64_t width_ = 0;
};

class ReadColumnsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "columns", &columns_, "widths", &widths_));
    const size_t n = static_cast<size_t>(num_outputs()) - 1;
    if (columns_.size() == n && widths_.size() == n) return absl::OkStatus();
    return errors::InvalidArgument("KvTableReadColumns wants a name and a width per column");
  }

  const char* doing() const override { return "reading"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeyVector(config, keys));
    TF_RETURN_IF_ERROR(CheckValueType(config, output_type(0)));
    std::vector<kvtable::ColumnOut> out;
    for (size_t i = 0; i < columns_.size(); ++i) {
      FoundColumn column;
      TF_RETURN_IF_ERROR(FindColumn(config, *open->table, columns_[i], widths_[i], &column));
      TensorShape shape = keys.shape();
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(widths_[i]));
      Tensor* rows = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(i), shape, &rows));
      out.push_back({column.number, rows->data(), widths_[i], column.generation});
    }
    Tensor* found = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(columns_.size()), keys.shape(), &found));
    open->table->GatherColumns(keys.data(), keys.NumElements(), out, found->flat<bool>().data(),
                               open->threads);
    return absl::OkStatus();
  }

 private:
  std::vector<std::string> columns_;
  std::vector<int64_t> widths_;
};

class ExportSinceOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ctx->GetAttr("dim", &dim_); }

  const char* doing() const override { return "exporting"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    if (dim_ != config.dim || output_type(0) != config.key_dtype || output_type(1) != config.value_dtype) {
      return errors::InvalidArgument(
          "Key-value variable '", config.name, "' has ", tf::DataTypeString(config.key_dtype),
          " keys and rows of ", tf::DataTypeString(config.value_dtype), "[", config.dim, "], wanted ",
          tf::DataTypeString(output_type(0)), " and ", tf::DataTypeString(output_type(1)), "[", dim_, "]");
    }
    if (!tf::TensorShapeUtils::IsScalar(ctx->input(1).shape())) {
      return errors::InvalidArgument("KvTableExportSince wants a scalar time, got ",
                                     ctx->input(1).shape().DebugString());
    }
    if (!HasTimes(*open->table) && CountsSteps(*open->table)) {
      return errors::FailedPrecondition(
          "Key-value variable '", config.name,
          "' stamps rows with steps, for they expire by steps: it does not know what "
          "was touched since a time. Follow its changes with "
          "tfplugin.CheckpointManager.");
    }
    const uint64_t since = static_cast<uint64_t>(std::max<int64_t>(0, ctx->input(1).scalar<int64_t>()()));
    std::vector<char> found_keys;
    std::vector<char> found_rows;
    kvtable::EvictExpired(open->table.get(), open->threads);
    FindKeys(since, open->table.get(), &open->threads, &found_keys);
    ReadRows(open->table.get(), &open->threads, &found_keys, &found_rows);
    const int64_t n = static_cast<int64_t>(found_keys.size()) / tf::DataTypeSize(config.key_dtype);
    Tensor* keys = nullptr;
    Tensor* rows = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n, dim_}), &rows));
    std::copy(found_keys.begin(), found_keys.end(), static_cast<char*>(keys->data()));
    std::copy(found_rows.begin(), found_rows.end(), static_cast<char*>(rows->data()));
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kChunk = 65536;  // rows looked at at a time
  static constexpr uint64_t kMicroseconds = 1000000;

  // Whether the scores of a table have the time of the last touch in them.
  static bool HasTimes(const kvtable::Table& table) {
    return table.max_capacity() > 0 && table.eviction() != kvtable::Eviction::kCustom &&
           table.eviction() != kvtable::Eviction::kEpochLfu;
  }

  static void FindKeys(uint64_t since, const kvtable::Table* table, kvtable::ParallelFor* threads,
                       std::vector<char>* found) {
    const size_t key_bytes = static_cast<size_t>(kvtable::SizeOf(table->key_type()));
    const bool has_scores = HasTimes(*table);
    const bool to_the_second = !has_scores || table->eviction() != kvtable::Eviction::kLru;
    const uint64_t at_least = to_the_second ? since / kMicroseconds : since;
    std::vector<char> keys(kChunk * key_bytes);
    std::vector<uint64_t> scores(has_scores ? kChunk : 0);
    std::vector<uint32_t> versions(has_scores ? 0 : kChunk);
    kvtable::Exporter::Buffers out;
    out.keys = keys.data();
    out.scores = has_scores ? scores.data() : nullptr;
    out.versions = has_scores ? nullptr : versions.data();
    const std::unique_ptr<kvtable::Exporter> exporter = table->Export();
    for (int64_t n; (n = exporter->Next(kChunk, out, *threads)) > 0;) {
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const uint64_t touched = !has_scores     ? versions[i]
                                 : to_the_second ? static_cast<uint32_t>(scores[i])
                                                 : scores[i];
        if (touched < at_least) continue;
        found->insert(found->end(), keys.begin() + static_cast<ptrdiff_t>(i * key_bytes),
                      keys.begin() + static_cast<ptrdiff_t>((i + 1) * key_bytes));
      }
    }
  }

  // Rows that have gone meanwhile are left out, keys and all.
  static void ReadRows(const kvtable::Table* table, kvtable::ParallelFor* threads, std::vector<char>* keys,
                       std::vector<char>* rows) {
    const size_t key_bytes = static_cast<size_t>(kvtable::SizeOf(table->key_type()));
    const size_t row_bytes = static_cast<size_t>(table->dim() * kvtable::SizeOf(table->value_type()));
    const size_t n = keys->size() / key_bytes;
    rows->resize(n * row_bytes);
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(n);
    table->Gather(keys->data(), static_cast<int64_t>(n), rows->data(), kvtable::Missing::kZeros, nullptr, 0,
                  there.get(), *threads);
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!there[i]) continue;
      std::memmove(keys->data() + kept * key_bytes, keys->data() + i * key_bytes, key_bytes);
      std::memmove(rows->data() + kept * row_bytes, rows->data() + i * row_bytes, row_bytes);
      ++kept;
    }
    keys->resize(kept * key_bytes);
    rows->resize(kept * row_bytes);
  }

  int64_t dim_ = 0;
};

KVTOOLS_REGISTER(
    Name("KvTableExport").HostMemory("keys").HostMemory("rows").HostMemory("freqs").HostMemory("versions"),
    ExportOp);
KVTOOLS_REGISTER(Name("KvTableKeys").HostMemory("keys"), KeysOp);
KVTOOLS_REGISTER(Name("KvTableReadColumn").HostMemory("keys").HostMemory("rows"), ReadColumnOp);
KVTOOLS_REGISTER(Name("KvTableReadColumns").HostMemory("keys").HostMemory("rows").HostMemory("found"),
                 ReadColumnsOp);
KVTOOLS_REGISTER(Name("KvTableExportSince").HostMemory("since").HostMemory("keys").HostMemory("rows"),
                 ExportSinceOp);

}  // namespace
}  // namespace kvtools
