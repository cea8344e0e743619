// Save and restore in the layout of docs/checkpoint-layout.md, a chunk of rows at a time.
//
// A save reads the keys first, then the rows chunk by chunk, so that each row is whole (value and slots of
// one moment) and training goes on meanwhile. A restore fills a new table and puts it in place when
// everything has been read: a checkpoint that turns out to be damaged leaves the variable as it was.

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "errors.h"
#include "kvtable/part_of.h"
#include "register_kernel.h"
#include "row_counts.h"
#include "table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_slice.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernel;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

constexpr int64_t kLayout = 1;
constexpr int64_t kChunkBytes = 64 << 20;

// Rows [start, start + length) along the first dimension.
tf::TensorSlice RowSlice(int dims, int64_t start, int64_t length) {
  tf::TensorSlice slice(dims);
  slice.set_start(0, start);
  slice.set_length(0, length);
  return slice;
}

TensorShape ColumnShape(int64_t n, int64_t width) {
  return width == 0 ? TensorShape({n}) : TensorShape({n, width});
}

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
    if (!absl::ConsumeSuffix(&other, kScratch) || other == name || WithoutStep(other) != WithoutStep(name)) continue;
    const std::string path = tf::io::JoinPath(beside, child);
    int64_t files = 0, folders = 0;
    LOG(WARNING) << "Removing " << path << ", left by a save that did not end";
    env->DeleteRecursively(path, &files, &folders).IgnoreError();  // another device's part of this save may be faster
  }
}

class SaveOp : public OpKernel {
 public:
  explicit SaveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_prefixes", &prefixes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("part", &part_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &parts_));
    const size_t n = static_cast<size_t>(num_inputs()) - 1;
    OP_REQUIRES(ctx, prefixes_.size() == n && names_.size() == n && part_.size() == n && parts_.size() == n,
                errors::InvalidArgument("KvTableSave wants one prefix, name, part and parts per table"));
  }

  void Compute(OpKernelContext* ctx) override {
    const std::string prefix = ctx->input(0).scalar<tf::tstring>()();
    const std::string folder(tf::io::Dirname(prefix));
    RemoveStaleScratch(ctx->env(), folder);
    OP_REQUIRES_OK(ctx, ctx->env()->RecursivelyCreateDir(folder));
    tf::BundleWriter writer(ctx->env(), prefix);
    OP_REQUIRES_OK(ctx, writer.status());
    KernelThreads threads(ctx);
    RowCounts counts;
    for (size_t i = 0; i < prefixes_.size(); ++i) {
      tf::core::RefCountPtr<TableResource> resource;
      std::shared_ptr<kvtable::Table> table;
      OP_REQUIRES_OK(ctx, LookupTable(ctx, static_cast<int>(i) + 1, &resource, &table));
      const TableConfig& config = resource->config();
      absl::Status saved;
      const absl::Status ran = CatchErrors(
          "saving", config.name, [&] { saved = Save(ctx, i, config, *table, &threads, &writer, &counts); });
      OP_REQUIRES_OK(ctx, ran);
      OP_REQUIRES_OK(ctx, saved);
    }
    OP_REQUIRES_OK(ctx, writer.Finish());
    OP_REQUIRES_OK(ctx, SetRowCounts(ctx->env(), prefix, counts));
  }

 private:
  std::string Meta(size_t i, const TableConfig& config, const kvtable::Table& table,
                   const std::vector<kvtable::SlotSpec>& slots) const {
    return "{\"layout\": " + std::to_string(kLayout) + ", \"name\": " + JsonQuote(names_[i]) +
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
      Tensor rows(config.value_dtype, TensorShape({initializer.num_rows, config.dim}));
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
                                              RowSlice(column.width == 0 ? 1 : 2, n, rows), chunk_rows));
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

// One saved part, as its metadata has it.
struct SavedPart {
  explicit SavedPart(std::string tensor_prefix) : prefix(std::move(tensor_prefix)) {}

  std::string prefix;
  int64_t parts = 1;
  int64_t rows = 0;
  bool has_freqs = false;
  bool has_versions = false;
  // Scores and what they are, where the table was bounded.
  bool has_scores = false;
  std::string eviction;
  std::vector<kvtable::SlotSpec> slots;
  std::optional<kvtable::Initializer> initializer;
};

class RestoreOp : public OpKernel {
 public:
  explicit RestoreOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_prefix", &base_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("part_infix", &infix_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("part", &part_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &parts_));
    std::string json;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer", &json));
    OP_REQUIRES_OK(ctx, CatchErrors("reading the initializer of", name(), [&] {
                     if (!json.empty()) own_initializer_ = InitializerFromJson(Json::Parse(json));
                   }));
  }

  void Compute(OpKernelContext* ctx) override {
    const std::string prefix = ctx->input(1).scalar<tf::tstring>()();
    tf::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    const TableConfig& config = resource->config();
    tf::BundleReader reader(ctx->env(), prefix);
    OP_REQUIRES_OK(ctx, reader.status());
    KernelThreads threads(ctx);
    absl::Status restored;
    std::shared_ptr<kvtable::Table> table;
    const absl::Status ran = CatchErrors("restoring from '" + prefix + "'", config.name, [&] {
      restored = Restore(config, prefix, *resource, &reader, &threads, &table);
    });
    OP_REQUIRES_OK(ctx, ran);
    OP_REQUIRES_OK(ctx, restored);
    resource->set_table(std::move(table));
  }

 private:
  absl::Status ReadMeta(const TableConfig& config, const std::string& where, tf::BundleReader* reader,
                        SavedPart* saved) const {
    Tensor text(tf::DT_STRING, TensorShape({}));
    TF_RETURN_IF_ERROR(reader->Lookup(saved->prefix + "-kvmeta", &text));
    const Json meta = Json::Parse(text.scalar<tf::tstring>()());
    if (meta.Int("layout") > kLayout) {
      return errors::Unimplemented("Checkpoint '", where, "': table '", saved->prefix, "' is of layout ",
                                   meta.Int("layout"), ", this version reads up to ", kLayout,
                                   ": upgrade kvtools.");
    }
    saved->parts = meta.Int("parts");
    if (meta.Int("dim") != config.dim) {
      return errors::InvalidArgument("Checkpoint '", where, "': table '", saved->prefix, "' has rows of dim ",
                                     meta.Int("dim"), ", key-value variable '", config.name, "' has dim ",
                                     config.dim, ": build the variable with embedding_dim=", meta.Int("dim"),
                                     ".");
    }
    saved->slots = SlotsFromJson(meta.At("slots"));
    if (meta.Has("initializer")) saved->initializer = InitializerFromJson(meta.At("initializer"));
    tf::DataType dtype;
    TensorShape shape;
    TF_RETURN_IF_ERROR(reader->LookupDtypeAndShape(saved->prefix + "-keys", &dtype, &shape));
    if (dtype != config.key_dtype) {
      return errors::InvalidArgument("Checkpoint '", where, "': table '", saved->prefix, "' has ",
                                     tf::DataTypeString(dtype), " keys, key-value variable '", config.name,
                                     "' has ", tf::DataTypeString(config.key_dtype),
                                     ": build it with key_dtype=", tf::DataTypeString(dtype), ".");
    }
    saved->rows = shape.dims() == 1 ? shape.dim_size(0) : -1;
    const auto check = [&](const std::string& column, tf::DataType want, int64_t width) -> absl::Status {
      TF_RETURN_IF_ERROR(reader->LookupDtypeAndShape(saved->prefix + column, &dtype, &shape));
      if (dtype != want) {
        return errors::InvalidArgument("Checkpoint '", where, "': tensor '", saved->prefix + column, "' is ",
                                       tf::DataTypeString(dtype), ", key-value variable '", config.name,
                                       "' wants ", tf::DataTypeString(want), ".");
      }
      if (shape != ColumnShape(saved->rows, width)) {
        return errors::DataLoss("Checkpoint '", where, "': tensor '", saved->prefix + column, "' has shape ",
                                shape.DebugString(), ", expected ",
                                ColumnShape(saved->rows, width).DebugString(), " as there are ", saved->rows,
                                " keys: the checkpoint is damaged.");
      }
      return absl::OkStatus();
    };
    saved->has_freqs = reader->Contains(saved->prefix + "-freqs");
    saved->has_versions = reader->Contains(saved->prefix + "-versions");
    if (saved->has_freqs) TF_RETURN_IF_ERROR(check("-freqs", tf::DT_UINT32, 0));
    if (saved->has_versions) TF_RETURN_IF_ERROR(check("-versions", tf::DT_UINT32, 0));
    saved->has_scores = reader->Contains(saved->prefix + "-scores");
    if (saved->has_scores) TF_RETURN_IF_ERROR(check("-scores", tf::DT_UINT64, 0));
    if (meta.Has("policies") && meta.At("policies").Has("eviction")) {
      saved->eviction = meta.At("policies").String("eviction");
    }
    TF_RETURN_IF_ERROR(check("-values", config.value_dtype, config.dim));
    for (const kvtable::SlotSpec& slot : saved->slots) {
      TF_RETURN_IF_ERROR(check("-slot-" + slot.name, config.value_dtype, slot.width));
    }
    if (saved->initializer && saved->initializer->kind == kvtable::Initializer::Kind::kRows) {
      TF_RETURN_IF_ERROR(reader->LookupDtypeAndShape(saved->prefix + "-init", &dtype, &shape));
      if (dtype != config.value_dtype || shape.dims() != 2 || shape.dim_size(1) != config.dim) {
        return errors::DataLoss("Checkpoint '", where, "': tensor '", saved->prefix, "-init' is ",
                                tf::DataTypeString(dtype), shape.DebugString(),
                                ": the checkpoint is damaged.");
      }
      Tensor rows(dtype, shape);
      TF_RETURN_IF_ERROR(reader->Lookup(saved->prefix + "-init", &rows));
      SetInitializerRows(rows, &*saved->initializer);
    }
    return absl::OkStatus();
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

  // Rows [start, start + length) of a column, from a tensor stored whole or in slices.
  static absl::Status ReadColumn(tf::BundleReader* reader, const std::string& name, tf::DataType dtype,
                                 int64_t rows, int64_t width, int64_t start, int64_t length,
                                 std::map<std::string, Tensor>* whole, Tensor* out) {
    if (length == rows) {
      *out = Tensor(dtype, ColumnShape(rows, width));
      return reader->Lookup(name, out);
    }
    std::vector<tf::TensorSlice> slices;
    TF_RETURN_IF_ERROR(reader->LookupTensorSlices(name, &slices));
    if (!slices.empty()) {
      *out = Tensor(dtype, ColumnShape(length, width));
      return reader->LookupSlice(name, RowSlice(width == 0 ? 1 : 2, start, length), out);
    }
    auto it = whole->find(name);
    if (it == whole->end()) {
      Tensor all(dtype, ColumnShape(rows, width));
      TF_RETURN_IF_ERROR(reader->Lookup(name, &all));
      it = whole->emplace(name, std::move(all)).first;
    }
    *out = it->second.Slice(start, start + length);
    return absl::OkStatus();
  }

  // Where the chunks of a part begin and how long they are: as it was written.
  static absl::Status Chunks(tf::BundleReader* reader, const SavedPart& saved,
                             std::vector<std::pair<int64_t, int64_t>>* chunks) {
    std::vector<tf::TensorSlice> slices;
    TF_RETURN_IF_ERROR(reader->LookupTensorSlices(saved.prefix + "-keys", &slices));
    for (const tf::TensorSlice& slice : slices) {
      if (!slice.IsFullAt(0)) chunks->emplace_back(slice.start(0), slice.length(0));
    }
    if (chunks->empty() && saved.rows > 0) chunks->emplace_back(0, saved.rows);
    std::sort(chunks->begin(), chunks->end());
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

  // Keeps rows `own` of a column, in place.
  static void Compact(const std::vector<int64_t>& own, int64_t width, Tensor* rows) {
    const int64_t bytes = std::max<int64_t>(1, width) * tf::DataTypeSize(rows->dtype());
    Tensor kept(rows->dtype(), ColumnShape(static_cast<int64_t>(own.size()), width));
    char* to = static_cast<char*>(kept.data());
    const char* from = static_cast<const char*>(rows->data());
    for (size_t i = 0; i < own.size(); ++i) std::memcpy(to + i * bytes, from + own[i] * bytes, bytes);
    *rows = std::move(kept);
  }

  absl::Status Restore(const TableConfig& config, const std::string& where, const TableResource& resource,
                       tf::BundleReader* reader, kvtable::ParallelFor* threads,
                       std::shared_ptr<kvtable::Table>* out) const {
    std::vector<SavedPart> saved;
    TF_RETURN_IF_ERROR(FindParts(config, where, reader, &saved));
    const SavedPart& reference = LargestPart(saved);
    kvtable::Initializer initializer;
    TF_RETURN_IF_ERROR(ChooseInitializer(config, where, resource, reference, &initializer));
    std::shared_ptr<kvtable::Table> table = resource.NewTable(initializer, threads->stream());
    const std::vector<kvtable::SlotSpec>& slots = reference.slots;
    table->EnsureSlots(slots, *threads);
    int64_t rows = 0;
    for (const SavedPart& part : saved) rows += part.rows;
    int64_t own_rows = static_cast<int64_t>(saved.size()) == parts_ ? saved[part_].rows : rows / parts_;
    if (config.max_capacity > 0) own_rows = std::min(own_rows, config.max_capacity);
    table->Reserve(own_rows, *threads);
    for (size_t p = 0; p < saved.size(); ++p) {
      const SavedPart& part = saved[p];
      // Under the same number of parts only our own has rows for us.
      if (static_cast<int64_t>(saved.size()) == parts_ && static_cast<int64_t>(p) != part_) continue;
      std::vector<std::pair<int64_t, int64_t>> chunks;
      TF_RETURN_IF_ERROR(Chunks(reader, part, &chunks));
      std::map<std::string, Tensor> whole;
      for (const auto& [start, length] : chunks) {
        const auto read = [&, start = start, length = length](const std::string& column, tf::DataType dtype,
                                                              int64_t width, Tensor* rows_out) {
          return ReadColumn(reader, part.prefix + column, dtype, part.rows, width, start, length, &whole,
                            rows_out);
        };
        // Scores of another kind are of no use here: the table starts from stamps then.
        const bool with_scores =
            config.max_capacity > 0 && part.has_scores && part.eviction == EvictionName(config.eviction);
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
        const std::vector<int64_t> own = config.key_dtype == tf::DT_INT32    ? OwnRows<int32_t>(keys)
                                         : config.key_dtype == tf::DT_UINT64 ? OwnRows<uint64_t>(keys)
                                                                             : OwnRows<int64_t>(keys);
        if (static_cast<int64_t>(own.size()) != keys.NumElements()) {
          Compact(own, 0, &keys);
          if (part.has_freqs) Compact(own, 0, &freqs);
          if (part.has_versions) Compact(own, 0, &versions);
          if (with_scores) Compact(own, 0, &scores);
          for (size_t s = 0; s < columns.size(); ++s)
            Compact(own, s == 0 ? config.dim : slots[s - 1].width, &columns[s]);
        }
        std::vector<kvtable::ColumnIn> in;
        for (size_t s = 0; s < columns.size(); ++s) {
          in.push_back({static_cast<int>(s), columns[s].data(), columns[s].dim_size(1)});
        }
        table->Import(keys.data(), keys.NumElements(), in,
                      part.has_freqs ? static_cast<const uint32_t*>(freqs.data()) : nullptr,
                      part.has_versions ? static_cast<const uint32_t*>(versions.data()) : nullptr,
                      with_scores ? static_cast<const uint64_t*>(scores.data()) : nullptr, *threads);
      }
    }
    *out = std::move(table);
    return absl::OkStatus();
  }

  absl::Status FindParts(const TableConfig& config, const std::string& where, tf::BundleReader* reader,
                         std::vector<SavedPart>* saved) const {
    if (reader->Contains(base_ + "-kvmeta")) {
      saved->push_back(SavedPart(base_));
    } else {
      for (int64_t i = 0; reader->Contains(base_ + infix_ + std::to_string(i) + "-kvmeta"); ++i) {
        saved->push_back(SavedPart(base_ + infix_ + std::to_string(i)));
      }
    }
    if (saved->empty()) {
      std::string tables;
      const std::string suffix = "-kvmeta";
      for (reader->Seek(""); reader->Valid(); reader->Next()) {
        const std::string key(reader->key());
        if (key.size() > suffix.size() &&
            key.compare(key.size() - suffix.size(), suffix.size(), suffix) == 0) {
          tables += (tables.empty() ? "" : ", ") + key.substr(0, key.size() - suffix.size());
        }
      }
      return errors::NotFound("Checkpoint '", where, "' has no key-value table '", base_, "' for variable '",
                              config.name, "'; it has [", tables, "].");
    }
    for (SavedPart& part : *saved) {
      TF_RETURN_IF_ERROR(ReadMeta(config, where, reader, &part));
      if (part.parts != static_cast<int64_t>(saved->size())) {
        return errors::DataLoss("Checkpoint '", where, "': table '", part.prefix, "' is one of ", part.parts,
                                " parts, but ", saved->size(), " are there: the checkpoint is incomplete.");
      }
    }
    // A part that no step has reached yet has no rows and may have no slots.
    const SavedPart& reference = LargestPart(*saved);
    for (const SavedPart& part : *saved) {
      if (part.rows > 0 && !(part.slots == reference.slots)) {
        return errors::DataLoss("Checkpoint '", where, "': tables '", part.prefix, "' and '",
                                reference.prefix,
                                "' have different slots: they come from different moments.");
      }
    }
    return absl::OkStatus();
  }

  static const SavedPart& LargestPart(const std::vector<SavedPart>& saved) {
    return *std::max_element(saved.begin(), saved.end(),
                             [](const SavedPart& a, const SavedPart& b) { return a.rows < b.rows; });
  }

  std::string base_;
  std::string infix_;
  int64_t part_ = 0;
  int64_t parts_ = 1;
  std::optional<kvtable::Initializer> own_initializer_;
};

KVTOOLS_REGISTER(Name("KvTableSave"), SaveOp);
KVTOOLS_REGISTER(Name("KvTableRestore"), RestoreOp);

}  // namespace
}  // namespace kvtools
