#include "saved_part.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include "bundle_columns.h"
#include "json.h"
#include "table_metadata.h"
#include "table_policies.h"
#include "tensorflow/core/framework/tensor_slice.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/protobuf/tensor_bundle.pb.h"
#include "tensorflow/core/util/saved_tensor_slice_util.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

// Looks at one part.
class PartReader {
 public:
  // `data_bytes`: the size of the bundle's data files; `files`: how many there are.
  PartReader(const TableConfig& config, const std::string& where, tf::BundleReader* reader,
             uint64_t data_bytes, int32_t files, SavedPart* part)
      : config_(config),
        where_(where),
        reader_(reader),
        data_bytes_(data_bytes),
        files_(files),
        part_(part) {}

  absl::Status Read() {
    tf::Tensor meta(tf::DT_STRING, tf::TensorShape({}));
    TF_RETURN_IF_ERROR(Find("-kvmeta", tf::DT_STRING));
    if (shape_.dims() != 0 || !slices_.empty()) return Bad("-kvmeta", "is no scalar");
    TF_RETURN_IF_ERROR(
        ReadError(where_, part_->prefix + "-kvmeta", reader_->Lookup(part_->prefix + "-kvmeta", &meta)));
    try {
      TF_RETURN_IF_ERROR(ReadMeta(Json::Parse(meta.scalar<tf::tstring>()())));
    } catch (const std::invalid_argument& error) {
      return Bad("-kvmeta", "is not what it should be (", error.what(), ")");
    }
    TF_RETURN_IF_ERROR(ReadKeys());
    if (part_->is_increment) TF_RETURN_IF_ERROR(ReadRemoved());
    TF_RETURN_IF_ERROR(CheckColumn("-values", config_.value_dtype, config_.dim));
    part_->has_freqs = Has("-freqs");
    part_->has_versions = Has("-versions");
    part_->has_scores = Has("-scores");
    part_->has_orders = Has("-orders");
    if (part_->has_freqs) TF_RETURN_IF_ERROR(CheckColumn("-freqs", tf::DT_UINT32, 0));
    if (part_->has_versions) TF_RETURN_IF_ERROR(CheckColumn("-versions", tf::DT_UINT32, 0));
    if (part_->has_scores) TF_RETURN_IF_ERROR(CheckColumn("-scores", tf::DT_UINT64, 0));
    if (part_->has_orders) TF_RETURN_IF_ERROR(CheckColumn("-orders", tf::DT_UINT64, 0));
    for (const kvtable::SlotSpec& slot : part_->slots) {
      TF_RETURN_IF_ERROR(CheckColumn("-slot-" + slot.name, config_.value_dtype, slot.width));
    }
    if (Has("-pending_keys")) TF_RETURN_IF_ERROR(FindCounts());
    if (Has("-pending_filter")) {
      TF_RETURN_IF_ERROR(Find("-pending_filter", tf::DT_UINT8));
      if (shape_.dims() != 1) return Bad("-pending_filter", "has shape ", shape_.DebugString());
      part_->filter_bytes = shape_.dim_size(0);
      if (part_->filter_bytes > 0 && part_->admission.kind != kvtable::AdmissionPolicy::Kind::kBloom) {
        return Bad("-pending_filter", "is there, but its kvmeta has no such admission");
      }
    }
    const bool has_rows = part_->initializer && part_->initializer->kind == kvtable::Initializer::Kind::kRows;
    return has_rows ? ReadInitialRows() : absl::OkStatus();
  }

 private:
  bool Has(const std::string& column) const { return reader_->Contains(part_->prefix + column); }

  template <class... What>
  absl::Status Bad(const std::string& column, const What&... what) const {
    return Damaged(where_, part_->prefix + column, what...);
  }

  absl::Status ReadMeta(const Json& meta) {
    if (meta.Int("layout") > kCheckpointLayout) {
      return errors::Unimplemented("Checkpoint '", where_, "': table '", part_->prefix, "' is of layout ",
                                   meta.Int("layout"), ", this version reads up to ", kCheckpointLayout,
                                   ": upgrade kvtools.");
    }
    part_->parts = meta.Int("parts");
    if (part_->parts < 1) return Bad("-kvmeta", "is of one of ", part_->parts, " parts");
    const int64_t dim = meta.Int("dim");
    if (dim < 1) return Bad("-kvmeta", "is of rows of dim ", dim);
    if (dim != config_.dim) {
      return errors::InvalidArgument("Checkpoint '", where_, "': table '", part_->prefix,
                                     "' has rows of dim ", dim, ", key-value variable '", config_.name,
                                     "' has dim ", config_.dim,
                                     ": build the variable with embedding_dim=", dim, ".");
    }
    part_->slots = SlotsFromJson(meta.At("slots"));
    std::set<std::string> names;
    for (const kvtable::SlotSpec& slot : part_->slots) {
      if (!names.insert(slot.name).second) return Bad("-kvmeta", "has slot '", slot.name, "' twice");
      if (slot.init == kvtable::SlotSpec::Init::kCopyValue && slot.width != dim) {
        return Bad("-kvmeta", "has slot '", slot.name, "' of width ", slot.width,
                   " that copies values of dim ", dim);
      }
    }
    part_->is_increment = meta.Bool("delta", false);
    part_->counts_steps = meta.Has("versions") && meta.String("versions") == "steps";
    if (meta.Has("draws")) part_->draws = meta.Uint("draws");
    if (meta.Has("initializer")) part_->initializer = InitializerFromJson(meta.At("initializer"));
    if (meta.Has("policies")) {
      const Json& policies = meta.At("policies");
      if (policies.Has("eviction")) part_->eviction = policies.String("eviction");
      if (policies.Has("admission")) part_->admission = AdmissionFromJson(policies.At("admission"));
      TF_RETURN_IF_ERROR(ReadNumber(policies, "step", &part_->step));
      part_->counts_steps |= part_->step.has_value();
      TF_RETURN_IF_ERROR(ReadNumber(policies, "epoch", &part_->epoch));
    }
    return absl::OkStatus();
  }

  absl::Status ReadNumber(const Json& of, const std::string& name, std::optional<uint32_t>* number) const {
    if (!of.Has(name)) return absl::OkStatus();
    const uint64_t found = of.Uint(name);
    if (found > UINT32_MAX) return Bad("-kvmeta", "is of ", name, " ", found);
    *number = static_cast<uint32_t>(found);
    return absl::OkStatus();
  }

  absl::Status FindCounts() {
    TF_RETURN_IF_ERROR(Find("-pending_keys", config_.key_dtype));
    if (shape_.dims() != 1) return Bad("-pending_keys", "has shape ", shape_.DebugString());
    part_->waiting_keys = shape_.dim_size(0);
    TF_RETURN_IF_ERROR(Find("-pending_counts", tf::DT_UINT32));
    if (shape_.dims() == 1 && shape_.dim_size(0) == part_->waiting_keys) return absl::OkStatus();
    return Bad("-pending_counts", "has shape ", shape_.DebugString(), " for ", part_->waiting_keys, " keys");
  }

  // The shape of a tensor, in shape_, and its slices, in slices_: such that they may be read.
  absl::Status Find(const std::string& column, tf::DataType dtype) {
    const std::string name = part_->prefix + column;
    tf::DataType found;
    if (!Has(column)) return Bad(column, "is missing");
    absl::Status looked = reader_->LookupDtypeAndShape(name, &found, &shape_);
    if (looked.ok()) looked = reader_->LookupTensorSlices(name, &slices_);
    if (!looked.ok()) return Bad(column, "cannot be read (", looked.message(), ")");
    // Keys and values may be those of another variable. What else there is goes by them.
    if (found != dtype && column == "-keys") {
      return errors::InvalidArgument("Checkpoint '", where_, "': table '", part_->prefix, "' has ",
                                     tf::DataTypeString(found), " keys, key-value variable '", config_.name,
                                     "' has ", tf::DataTypeString(dtype),
                                     ": build it with key_dtype=", tf::DataTypeString(found), ".");
    }
    if (found != dtype && column == "-values") {
      return errors::InvalidArgument("Checkpoint '", where_, "': tensor '", name, "' is ",
                                     tf::DataTypeString(found), ", key-value variable '", config_.name,
                                     "' has ", tf::DataTypeString(dtype),
                                     " rows: build it with value_dtype=", tf::DataTypeString(found),
                                     ", write the checkpoint anew by `kvtools cast`, or take the "
                                     "rows over by tfplugin.warm_start(cast=True).");
    }
    if (found != dtype) {
      return Bad(column, "is ", tf::DataTypeString(found), ", expected ", tf::DataTypeString(dtype));
    }
    // Before memory is asked for.
    if (dtype != tf::DT_STRING && static_cast<uint64_t>(shape_.num_elements()) >
                                      data_bytes_ / static_cast<uint64_t>(tf::DataTypeSize(dtype))) {
      return Bad(column, "is of shape ", shape_.DebugString(), ", which is more than the ", data_bytes_,
                 " bytes that the data files have");
    }
    return CheckSlices(column, dtype);
  }

  // That the tensor is whole, or in slices that are runs of rows, one behind the other. Leaves them in order.
  absl::Status CheckSlices(const std::string& column, tf::DataType dtype) {
    const auto first = [](const tf::TensorSlice& slice) { return slice.IsFullAt(0) ? 0 : slice.start(0); };
    for (const tf::TensorSlice& slice : slices_) {
      bool is_run = slice.dims() == shape_.dims() && slice.dims() > 0;
      for (int d = 1; is_run && d < slice.dims(); ++d) {
        is_run = slice.IsFullAt(d) || (slice.start(d) == 0 && slice.length(d) == shape_.dim_size(d));
      }
      if (!is_run) return Bad(column, "has a slice ", slice.DebugString(), ", which is no run of rows");
    }
    std::sort(slices_.begin(), slices_.end(),
              [&](const tf::TensorSlice& a, const tf::TensorSlice& b) { return first(a) < first(b); });
    int64_t next = 0;
    for (const tf::TensorSlice& slice : slices_) {
      const int64_t length = slice.IsFullAt(0) ? shape_.dim_size(0) : slice.length(0);
      if (first(slice) != next || length < 0 || length > shape_.dim_size(0) - next) {
        return Bad(column, "is in slices that are not one behind the other");
      }
      next += length;
      // Where the slice itself is: TensorFlow takes for granted that it is as the tensor is.
      tf::DataType stored;
      tf::TensorShape stored_shape;
      const absl::Status looked = reader_->LookupDtypeAndShape(
          tf::checkpoint::EncodeTensorNameSlice(part_->prefix + column, slice), &stored, &stored_shape);
      tf::TensorShape wanted = shape_;
      wanted.set_dim(0, length);
      if (!looked.ok() || stored != dtype || stored_shape != wanted) {
        return Bad(column, "has a slice ", slice.DebugString(),
                   " that is missing, or of another dtype or shape");
      }
    }
    if (slices_.empty() || next == shape_.dim_size(0)) return absl::OkStatus();
    return Bad(column, "has slices of ", next, " of its ", shape_.dim_size(0), " rows");
  }

  absl::Status ReadKeys() {
    TF_RETURN_IF_ERROR(Find("-keys", config_.key_dtype));
    if (shape_.dims() != 1) return Bad("-keys", "has shape ", shape_.DebugString(), ", expected a vector");
    part_->rows = shape_.dim_size(0);
    return NotePlaces("-keys", config_.key_dtype, 0, part_->rows);
  }

  absl::Status ReadRemoved() {
    TF_RETURN_IF_ERROR(Find("-removed", config_.key_dtype));
    if (shape_.dims() != 1) return Bad("-removed", "has shape ", shape_.DebugString(), ", expected a vector");
    part_->removed = shape_.dim_size(0);
    return NotePlaces("-removed", config_.key_dtype, 0, part_->removed);
  }

  // Where the rows of the column lie that was found last.
  absl::Status NotePlaces(const std::string& column, tf::DataType dtype, int64_t width, int64_t column_rows) {
    StoredColumn& stored = part_->columns[column];
    stored.name = part_->prefix + column;
    stored.row_bytes = std::max<int64_t>(1, width) * tf::DataTypeSize(dtype);
    const auto note = [&](const std::string& key, int64_t start, int64_t rows) -> absl::Status {
      tf::BundleEntryProto entry;
      reader_->Seek(key);
      if (!reader_->Valid() || reader_->key() != key ||
          !entry.ParseFromArray(reader_->value().data(), static_cast<int>(reader_->value().size()))) {
        return Bad(column, "has an entry that cannot be read");
      }
      if (entry.shard_id() < 0 || entry.shard_id() >= files_ || entry.offset() < 0 ||
          entry.size() != rows * stored.row_bytes) {
        return Bad(column, "has an entry of ", entry.size(), " bytes at byte ", entry.offset(),
                   " of data file ", entry.shard_id(), " for ", rows, " rows of ", stored.row_bytes,
                   " bytes");
      }
      if (rows > 0) {
        stored.runs.push_back(
            {start, rows, entry.shard_id(), entry.offset(), tf::crc32c::Unmask(entry.crc32c())});
      }
      return absl::OkStatus();
    };
    if (slices_.empty()) return note(stored.name, 0, column_rows);
    int64_t start = 0;
    for (const tf::TensorSlice& slice : slices_) {
      const int64_t rows = slice.IsFullAt(0) ? column_rows : slice.length(0);
      TF_RETURN_IF_ERROR(note(tf::checkpoint::EncodeTensorNameSlice(stored.name, slice), start, rows));
      start += rows;
    }
    return absl::OkStatus();
  }

  absl::Status CheckColumn(const std::string& column, tf::DataType dtype, int64_t width) {
    TF_RETURN_IF_ERROR(Find(column, dtype));
    const int dims = width == 0 ? 1 : 2;
    if (shape_.dims() == dims && shape_.dim_size(0) == part_->rows &&
        (width == 0 || shape_.dim_size(1) == width)) {
      return NotePlaces(column, dtype, width, part_->rows);
    }
    return Bad(column, "has shape ", shape_.DebugString(), ", expected [", part_->rows,
               width == 0 ? "" : absl::StrCat(",", width), "] as there are ", part_->rows, " keys");
  }

  absl::Status ReadInitialRows() {
    TF_RETURN_IF_ERROR(Find("-init", config_.value_dtype));
    if (shape_.dims() != 2 || shape_.dim_size(0) < 1 || shape_.dim_size(1) != config_.dim) {
      return Bad("-init", "has shape ", shape_.DebugString(), ", expected rows of ", config_.dim);
    }
    tf::Tensor rows(config_.value_dtype, shape_);
    if (rows.data() == nullptr) return errors::ResourceExhausted("no memory for '", part_->prefix, "-init'");
    TF_RETURN_IF_ERROR(
        ReadError(where_, part_->prefix + "-init", reader_->Lookup(part_->prefix + "-init", &rows)));
    SetInitializerRows(rows, &*part_->initializer);
    return absl::OkStatus();
  }

  const TableConfig& config_;
  const std::string& where_;
  tf::BundleReader* const reader_;
  const uint64_t data_bytes_;
  const int32_t files_;
  SavedPart* const part_;
  tf::TensorShape shape_;
  std::vector<tf::TensorSlice> slices_;
};

// How many bytes the data files of a bundle have in all.
absl::Status DataBytes(tf::Env* env, const std::string& prefix, uint64_t* bytes) {
  const std::string folder(tf::io::Dirname(prefix));
  const std::string begin = std::string(tf::io::Basename(prefix)) + ".data-";
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(env->GetChildren(folder.empty() ? "." : folder, &names));
  *bytes = 0;
  for (const std::string& name : names) {
    if (name.compare(0, begin.size(), begin) != 0) continue;
    uint64_t size = 0;
    TF_RETURN_IF_ERROR(env->GetFileSize(tf::io::JoinPath(folder, name), &size));
    *bytes += size;
  }
  return absl::OkStatus();
}

std::string TablesIn(tf::BundleReader* reader) {
  std::string tables;
  const std::string suffix = "-kvmeta";
  for (reader->Seek(""); reader->Valid(); reader->Next()) {
    const std::string key(reader->key());
    if (key.size() > suffix.size() && key.compare(key.size() - suffix.size(), suffix.size(), suffix) == 0) {
      tables += (tables.empty() ? "" : ", ") + key.substr(0, key.size() - suffix.size());
    }
  }
  return tables;
}

}  // namespace

absl::Status ReadError(const std::string& where, const std::string& tensor, const absl::Status& status) {
  if (status.ok()) return status;
  if (absl::IsDataLoss(status) || absl::IsOutOfRange(status)) {
    return Damaged(where, tensor, "cannot be read (", status.message(), ")");
  }
  return absl::Status(status.code(),
                      absl::StrCat("Checkpoint '", where, "': tensor '", tensor, "': ", status.message()));
}

absl::Status CountDataFiles(const std::string& where, tf::BundleReader* reader, int32_t* files) {
  tf::BundleHeaderProto header;
  reader->Seek(tf::kHeaderEntryKey);
  if (!reader->Valid() || !reader->key().empty() ||
      !header.ParseFromArray(reader->value().data(), static_cast<int>(reader->value().size())) ||
      header.num_shards() < 1) {
    return errors::DataLoss("Checkpoint '", where,
                            "': its index does not say how many data files there are.");
  }
  if (header.endianness() != tf::BundleHeaderProto::LITTLE) {
    return errors::Unimplemented("Checkpoint '", where,
                                 "' was written on a machine that stores the high byte of a number first: it "
                                 "can be restored on such a machine only.");
  }
  *files = header.num_shards();
  return absl::OkStatus();
}

absl::Status FindSavedParts(const TableConfig& config, const std::string& where, const std::string& base,
                            const std::string& infix, tf::Env* env, tf::BundleReader* reader, bool increment,
                            std::vector<SavedPart>* saved) {
  const auto add = [&](std::string prefix) {
    saved->emplace_back();
    saved->back().prefix = std::move(prefix);
  };
  if (reader->Contains(base + "-kvmeta")) {
    add(base);
  } else {
    for (int64_t i = 0; reader->Contains(base + infix + std::to_string(i) + "-kvmeta"); ++i) {
      add(base + infix + std::to_string(i));
    }
  }
  if (saved->empty()) {
    return errors::NotFound("Checkpoint '", where, "' has no key-value table '", base, "' for variable '",
                            config.name, "'; it has [", TablesIn(reader), "].");
  }
  uint64_t data_bytes = 0;
  int32_t files = 0;
  TF_RETURN_IF_ERROR(DataBytes(env, where, &data_bytes));
  TF_RETURN_IF_ERROR(CountDataFiles(where, reader, &files));
  for (SavedPart& part : *saved) {
    TF_RETURN_IF_ERROR(PartReader(config, where, reader, data_bytes, files, &part).Read());
    if (part.is_increment && !increment) {
      return errors::FailedPrecondition(
          "Checkpoint '", where, "' is an increment: of table '", part.prefix,
          "' it has only what changed. Restore with tfplugin.CheckpointManager, which takes the whole "
          "checkpoint and "
          "the increments after it, or fold them into one with `kvtools merge`.");
    }
    if (!part.is_increment && increment) {
      return errors::FailedPrecondition("Checkpoint '", where,
                                        "' is no increment: it has all rows of table '", part.prefix,
                                        "'. Give it first, and increments behind it.");
    }
    if (part.parts != static_cast<int64_t>(saved->size())) {
      return errors::DataLoss("Checkpoint '", where, "': table '", part.prefix, "' is one of ", part.parts,
                              " parts, but ", saved->size(), " are there: the checkpoint is incomplete.");
    }
  }
  const SavedPart& reference = LargestPart(*saved);
  for (const SavedPart& part : *saved) {
    if (part.rows > 0 && !(part.slots == reference.slots)) {
      return errors::DataLoss("Checkpoint '", where, "': tables '", part.prefix, "' and '", reference.prefix,
                              "' have different slots: they come from different moments.");
    }
  }
  return absl::OkStatus();
}

const SavedPart& LargestPart(const std::vector<SavedPart>& saved) {
  return *std::max_element(saved.begin(), saved.end(),
                           [](const SavedPart& a, const SavedPart& b) { return a.rows < b.rows; });
}

}  // namespace kvtools
