// Tensors of a bundle that were written in slices before it was known how many rows there would be.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "errors.h"
#include "tensorflow/core/lib/io/iterator.h"
#include "tensorflow/core/lib/io/table.h"
#include "tensorflow/core/lib/io/table_builder.h"
#include "tensorflow/core/lib/io/table_options.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/tensor_bundle.pb.h"
#include "tensorflow/core/util/tensor_bundle/naming.h"

namespace kvtools {

// The rows that a tensor is said to have until they are counted: more than a table holds, and few enough that
// a tensor of the widest rows has a number of elements.
inline constexpr int64_t kUncounted = int64_t{1} << 38;

// How many rows tensors turned out to have, by name.
using RowCounts = std::map<std::string, int64_t>;

// Writes the index of a finished bundle anew, with these numbers of rows. The data stay as they are.
inline absl::Status SetRowCounts(tensorflow::Env* env, const std::string& prefix, const RowCounts& counts) {
  namespace tf = tensorflow;
  if (counts.empty()) return absl::OkStatus();
  const std::string name = tf::MetaFilename(prefix);
  const std::string counted = name + ".counted";
  tf::table::Options options;
  options.compression = tf::table::kNoCompression;

  uint64_t bytes = 0;
  TF_RETURN_IF_ERROR(env->GetFileSize(name, &bytes));
  std::unique_ptr<tf::RandomAccessFile> file;
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(name, &file));
  tf::table::Table* opened = nullptr;
  TF_RETURN_IF_ERROR(tf::table::Table::Open(options, file.get(), bytes, &opened));
  const std::unique_ptr<tf::table::Table> index(opened);
  std::unique_ptr<tf::WritableFile> out;
  TF_RETURN_IF_ERROR(env->NewWritableFile(counted, &out));
  tf::table::TableBuilder builder(options, out.get());
  const std::unique_ptr<tf::table::Iterator> at(index->NewIterator());
  for (at->SeekToFirst(); at->Valid(); at->Next()) {
    const auto count = counts.find(std::string(at->key()));
    if (count == counts.end()) {
      builder.Add(at->key(), at->value());
      continue;
    }
    tf::BundleEntryProto entry;
    if (!entry.ParseFromArray(at->value().data(), static_cast<int>(at->value().size()))) {
      builder.Abandon();
      return errors::DataLoss("'", name, "' has an entry '", count->first, "' that cannot be read.");
    }
    entry.mutable_shape()->mutable_dim(0)->set_size(count->second);
    builder.Add(at->key(), entry.SerializeAsString());
  }
  const absl::Status read = at->status();
  if (!read.ok()) {
    builder.Abandon();
    return read;
  }
  TF_RETURN_IF_ERROR(builder.Finish());
  TF_RETURN_IF_ERROR(out->Close());
  return env->RenameFile(counted, name);
}

}  // namespace kvtools
