#include "bundle_files.h"

#include <algorithm>
#include <map>
#include <utility>

#include "bundle_columns.h"
#include "errors.h"
#include "local_file.h"
#include "tensorflow/core/lib/core/coding.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/lib/io/table_builder.h"
#include "tensorflow/core/lib/io/table_options.h"
#include "tensorflow/core/util/saved_tensor_slice_util.h"
#include "tensorflow/core/util/tensor_bundle/naming.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

// Bytes are checked and written in pieces that stay in the processor's cache in between.
constexpr int64_t kWritePieceBytes = 1 << 20;

}  // namespace

BundleFiles::BundleFiles(tf::Env* env, std::string prefix, int writers)
    : env_(env), prefix_(std::move(prefix)), writers_(static_cast<size_t>(writers)) {}

BundleFiles::~BundleFiles() {
  if (finished_) return;
  for (size_t w = 0; w < writers_.size(); ++w) {
    if (writers_[w].file == nullptr) continue;
    writers_[w].file->Close().IgnoreError();
    env_->DeleteFile(Unfinished(static_cast<int>(w))).IgnoreError();  // may have its last name already
  }
  for (const std::string& name : made_) env_->DeleteFile(name).IgnoreError();
}

std::string BundleFiles::Unfinished(int writer) const {
  return prefix_ + ".unfinished-" + std::to_string(writer);
}

int BundleFiles::AddColumn(std::string name, tf::DataType dtype, int64_t width) {
  columns_.push_back({std::move(name), dtype, width});
  return static_cast<int>(columns_.size()) - 1;
}

absl::Status BundleFiles::Append(int writer, const char* data, int64_t size, Place* place) {
  Writer& to = writers_[static_cast<size_t>(writer)];
  if (to.file == nullptr) TF_RETURN_IF_ERROR(NewLocalFile(Unfinished(writer), writers(), &to.file));
  if (to.file == nullptr) TF_RETURN_IF_ERROR(env_->NewWritableFile(Unfinished(writer), &to.file));
  if (place->size == 0) place->offset = to.size;
  for (int64_t done = 0; done < size;) {
    const auto piece = static_cast<size_t>(std::min(kWritePieceBytes, size - done));
    place->crc = tf::crc32c::Extend(place->crc, data + done, piece);
    TF_RETURN_IF_ERROR(to.file->Append(absl::string_view(data + done, piece)));
    done += static_cast<int64_t>(piece);
  }
  to.size += size;
  place->size += size;
  return absl::OkStatus();
}

absl::Status BundleFiles::AppendRows(int writer, int column, int64_t start, int64_t rows, const void* data) {
  const Column& of = columns_[static_cast<size_t>(column)];
  Run run{column, start, rows, {}};
  const int64_t bytes = rows * std::max<int64_t>(1, of.width) * tf::DataTypeSize(of.dtype);
  TF_RETURN_IF_ERROR(Append(writer, static_cast<const char*>(data), bytes, &run.place));
  writers_[static_cast<size_t>(writer)].runs.push_back(run);
  return absl::OkStatus();
}

absl::Status BundleFiles::AddTensor(int writer, const std::string& name, const tf::Tensor& tensor) {
  Whole whole{name, tensor.dtype(), tensor.shape(), {}};
  const auto bytes = tensor.tensor_data();
  TF_RETURN_IF_ERROR(Append(writer, bytes.data(), static_cast<int64_t>(bytes.size()), &whole.place));
  writers_[static_cast<size_t>(writer)].whole.push_back(std::move(whole));
  return absl::OkStatus();
}

absl::Status BundleFiles::AddString(int writer, const std::string& name, const std::string& text) {
  // Strings are stored as their lengths, a checksum of these, and their bytes. The checksum of it all has the
  // lengths as numbers of four bytes, and not as they are stored.
  std::string bytes;
  tf::core::PutVarint64(&bytes, text.size());
  const auto length = static_cast<uint32_t>(text.size());
  uint32_t crc = tf::crc32c::Extend(0, reinterpret_cast<const char*>(&length), sizeof(length));
  const uint32_t lengths_crc = tf::crc32c::Mask(crc);
  bytes.append(reinterpret_cast<const char*>(&lengths_crc), sizeof(lengths_crc));
  crc = tf::crc32c::Extend(crc, reinterpret_cast<const char*>(&lengths_crc), sizeof(lengths_crc));
  bytes += text;
  Whole whole{name, tf::DT_STRING, tf::TensorShape({}), {}};
  TF_RETURN_IF_ERROR(Append(writer, bytes.data(), static_cast<int64_t>(bytes.size()), &whole.place));
  whole.place.crc = tf::crc32c::Extend(crc, text.data(), text.size());
  writers_[static_cast<size_t>(writer)].whole.push_back(std::move(whole));
  return absl::OkStatus();
}

BundleFiles::Entry BundleFiles::EntryOf(const Place& place, int32_t file, tf::DataType dtype,
                                        const tf::TensorShape& shape) const {
  Entry entry;
  entry.set_dtype(dtype);
  shape.AsProto(entry.mutable_shape());
  entry.set_shard_id(file);
  entry.set_offset(place.offset);
  entry.set_size(place.size);
  entry.set_crc32c(tf::crc32c::Mask(place.crc));
  return entry;
}

absl::Status BundleFiles::Finish() {
  std::vector<int32_t> file_of(writers_.size(), 0);
  int files = 0;
  for (size_t w = 0; w < writers_.size(); ++w) {
    if (writers_[w].file != nullptr) file_of[w] = files++;
  }
  files = std::max(files, 1);
  for (size_t w = 0; w < writers_.size(); ++w) {
    if (writers_[w].file == nullptr) continue;
    TF_RETURN_IF_ERROR(writers_[w].file->Close());
    made_.push_back(tf::DataFilename(prefix_, file_of[w], files));
    TF_RETURN_IF_ERROR(env_->RenameFile(Unfinished(static_cast<int>(w)), made_.back()));
  }
  TF_RETURN_IF_ERROR(WriteIndex(file_of, files));
  finished_ = true;
  return absl::OkStatus();
}

absl::Status BundleFiles::WriteIndex(const std::vector<int32_t>& file_of, int files) {
  struct Found {
    const Run* run;
    int32_t file;
  };
  std::vector<std::vector<Found>> runs(columns_.size());
  std::map<std::string, std::string> entries;
  for (size_t w = 0; w < writers_.size(); ++w) {
    for (const Run& run : writers_[w].runs)
      runs[static_cast<size_t>(run.column)].push_back({&run, file_of[w]});
    for (const Whole& whole : writers_[w].whole) {
      entries[whole.name] = EntryOf(whole.place, file_of[w], whole.dtype, whole.shape).SerializeAsString();
    }
  }
  for (size_t c = 0; c < columns_.size(); ++c) {
    const Column& column = columns_[c];
    std::sort(runs[c].begin(), runs[c].end(),
              [](const Found& a, const Found& b) { return a.run->start < b.run->start; });
    int64_t rows = 0;
    for (const Found& found : runs[c]) rows += found.run->rows;
    Entry whole =
        EntryOf(runs[c].empty() ? Place() : runs[c][0].run->place, runs[c].empty() ? 0 : runs[c][0].file,
                column.dtype, ColumnShape(rows, column.width));
    if (runs[c].size() > 1) {
      whole.clear_shard_id();
      whole.clear_offset();
      whole.clear_size();
      whole.clear_crc32c();
      for (const Found& found : runs[c]) {
        const tf::TensorSlice slice = RowSlice(column.width, found.run->start, found.run->rows);
        slice.AsProto(whole.add_slices());
        entries[tf::checkpoint::EncodeTensorNameSlice(column.name, slice)] =
            EntryOf(found.run->place, found.file, column.dtype, ColumnShape(found.run->rows, column.width))
                .SerializeAsString();
      }
    }
    entries[column.name] = whole.SerializeAsString();
  }
  tf::BundleHeaderProto header;
  header.set_num_shards(files);
  header.set_endianness(tf::BundleHeaderProto::LITTLE);
  header.mutable_version()->set_producer(tf::kTensorBundleVersion);
  header.mutable_version()->set_min_consumer(tf::kTensorBundleMinConsumer);
  entries[tf::kHeaderEntryKey] = header.SerializeAsString();

  // Under its name only when it is whole.
  const std::string unfinished = prefix_ + ".unfinished-index";
  made_.push_back(unfinished);
  std::unique_ptr<tf::WritableFile> out;
  TF_RETURN_IF_ERROR(env_->NewWritableFile(unfinished, &out));
  tf::table::Options options;
  options.compression = tf::table::kNoCompression;
  tf::table::TableBuilder builder(options, out.get());
  for (const auto& [key, value] : entries) builder.Add(key, value);
  TF_RETURN_IF_ERROR(builder.Finish());
  TF_RETURN_IF_ERROR(out->Close());
  return env_->RenameFile(unfinished, tf::MetaFilename(prefix_));
}

}  // namespace kvtools
