// Large files of a local disk, read and written past the page cache.
//
// What a save of gigabytes writes nobody reads soon. In the page cache it would take memory that the table, the training
// data and the files of others have a use for; and where there is not so much memory, the system takes pages back
// as fast as it gives them, and the save waits for that.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/platform/file_system.h"

namespace kvtools {

// A new file that is written from front to back, one of `writers` that are written at once. Its first kInCache bytes are left
// in the page cache, what follows goes past it; but for a file system that cannot do that, and for a disk on which
// it would take longer. Null where the name is no local one: then it is TensorFlow's to open.
absl::Status NewLocalFile(const std::string& name, int writers,
                          std::unique_ptr<tensorflow::WritableFile>* file);

inline constexpr int64_t kInCache = int64_t{64} << 20;

// A file that is read at any place, by any thread: what is in the page cache from there, and the rest past it.
class LocalReader {
 public:
  // Null where it has to be read by TensorFlow.
  static std::unique_ptr<LocalReader> Open(const std::string& name);
  ~LocalReader();
  LocalReader(const LocalReader&) = delete;
  void operator=(const LocalReader&) = delete;

  // Fills `out`. DataLoss where the file ends before.
  absl::Status Read(int64_t offset, int64_t size, char* out);

 private:
  LocalReader(int cached, int direct, int64_t size, void* mapped);
  bool IsInCache(int64_t offset, int64_t size) const;
  absl::Status ReadPast(int64_t offset, int64_t size, char* out);

  class Buffer;
  std::unique_ptr<Buffer> TakeBuffer();

  const int cached_;
  const int direct_;
  const int64_t size_;
  void* const mapped_;  // never touched: to ask which pages are in the cache
  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> buffers_;  // that nobody uses
};

}  // namespace kvtools
