// A TensorFlow bundle that several threads write at once: a data file for each of them, and one index.
//
// TensorFlow's own writer is of one thread and one file. The format is the same: any reader of bundles reads
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/tensor_bundle.pb.h"

namespace kvtools {

class BundleFiles {
 public:
  // The bundle `prefix`, by writers numbered from 0. Each writer belongs to one thread at a time.
  BundleFiles(tensorflow::Env* env, std::string prefix, int writers);
  // Deletes what was written, unless the bundle was finished.
  ~BundleFiles();
  BundleFiles(const BundleFiles&) = delete;
  void operator=(const BundleFiles&) = delete;

  int writers() const { return static_cast<int>(writers_.size()); }

  // A tensor whose rows come in runs, from any writer: rows of `width` elements, or of one where it is 0.
  // Returns its number. Before the writers begin.
  int AddColumn(std::string name, tensorflow::DataType dtype, int64_t width);

  // Rows [start, start + rows) of a column. In the end runs cover its rows without gap, in whatever order
  // they came. One run alone is stored as a whole tensor, several as slices.
  absl::Status AppendRows(int writer, int column, int64_t start, int64_t rows, const void* data);

  // A whole tensor, and a scalar of a string.
  absl::Status AddTensor(int writer, const std::string& name, const tensorflow::Tensor& tensor);
  absl::Status AddString(int writer, const std::string& name, const std::string& text);

  // Puts the files in their places, and writes the index. Nobody sees the bundle before.
  absl::Status Finish();

 private:
  struct Column {
    std::string name;
    tensorflow::DataType dtype;
    int64_t width;
  };
  // Where bytes lie in the writer's file.
  struct Place {
    int64_t offset = 0;
    int64_t size = 0;
    uint32_t crc = 0;
  };
  struct Run {
    int column;
    int64_t start;
    int64_t rows;
    Place place;
  };
  struct Whole {
    std::string name;
    tensorflow::DataType dtype;
    tensorflow::TensorShape shape;
    Place place;
  };
  struct Writer {
    std::unique_ptr<tensorflow::WritableFile> file;  // none until the first byte
    int64_t size = 0;
    std::vector<Run> runs;
    std::vector<Whole> whole;
  };
  using Entry = tensorflow::BundleEntryProto;

  std::string Unfinished(int writer) const;
  absl::Status Append(int writer, const char* data, int64_t size, Place* place);
  Entry EntryOf(const Place& place, int32_t file, tensorflow::DataType dtype,
                const tensorflow::TensorShape& shape) const;
  absl::Status WriteIndex(const std::vector<int32_t>& file_of, int files);

  tensorflow::Env* const env_;
  const std::string prefix_;
  std::vector<Column> columns_;
  std::vector<Writer> writers_;
  std::vector<std::string> made_;  // files to delete if the bundle is not finished
  bool finished_ = false;
};

}  // namespace kvtools
