// Rows of a saved column, a run at a time, from any thread.
//
// TensorFlow's reader of bundles is of one thread, and reads a tensor that is stored whole as a whole. This one
// reads any run of rows of any column, and still checks every checksum: those of the pieces in which a stored
// run was read are put together.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "local_file.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/env.h"

namespace kvtools {

// Rows [start, start + rows) of a column, as they lie in a data file.
struct StoredRun {
  int64_t start = 0;
  int64_t rows = 0;
  int32_t file = 0;
  int64_t offset = 0;
  uint32_t crc = 0;
};

// A column: its runs, one behind the other.
struct StoredColumn {
  std::string name;  // of the tensor
  int64_t row_bytes = 0;
  std::vector<StoredRun> runs;
};

// The data files of a bundle, opened as they are needed. Any thread.
class DataFiles {
 public:
  DataFiles(tensorflow::Env* env, std::string prefix, int32_t files);

  // Fills `out` with `size` bytes, and extends `crc` over them.
  absl::Status Read(int32_t file, int64_t offset, int64_t size, char* out, uint32_t* crc);

 private:
  // One of the two.
  struct DataFile {
    std::unique_ptr<LocalReader> local;
    std::unique_ptr<tensorflow::RandomAccessFile> other;
  };
  absl::Status Open(int32_t file, DataFile** opened);
  absl::Status ReadPiece(DataFile* from, int64_t offset, int64_t size, char* out);

  tensorflow::Env* const env_;
  const std::string prefix_;
  const int32_t files_;
  std::mutex mutex_;
  std::map<int32_t, DataFile> opened_;
};

// Reads a column. Rows are read once each; `where` is the checkpoint, for messages.
class ColumnReader {
 public:
  ColumnReader(const std::string& where, const StoredColumn* column, DataFiles* files)
      : where_(where), column_(column), files_(files) {}

  int64_t row_bytes() const { return column_->row_bytes; }

  // Rows [start, start + rows), into `out`. Any thread.
  absl::Status Read(int64_t start, int64_t rows, char* out);

  // After all rows have been read: that the checksums of the runs that were read in pieces are right.
  absl::Status Finish();

 private:
  struct Piece {
    uint32_t crc;
    int64_t bytes;
  };
  absl::Status Differs() const;

  const std::string where_;
  const StoredColumn* const column_;
  DataFiles* const files_;
  std::mutex mutex_;
  std::map<size_t, std::map<int64_t, Piece>> pieces_;  // of runs, by their first rows
};

}  // namespace kvtools
