// What of a file the system has in memory, read there: without a system call for each row.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace kvtable {

// A mapping of a file, for reading, that is looked at only where the system says that it has the page: to read another
// would wait for the disk, one page after the other, and a disk that fails would be a signal. (A page that is given up
// between the two is read by the access.) Nothing is known of a file that cannot be mapped. Any thread.
class FilePages {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kMostBytes = size_t{1} << 20;  // of a Range

  explicit FilePages(int file);
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // Some pages of the file, and which of them are in memory.
  class Range {
   public:
    // The bytes of the file [at, at + bytes), or null where not all of them are in memory, or of the range.
    const char* Find(uint64_t at, size_t bytes) const {
      if (bytes == 0 || at < begin_ || at > end_ || bytes > end_ - at) return nullptr;
      for (size_t page = (at - begin_) / kPageBytes; page <= (at - begin_ + bytes - 1) / kPageBytes; ++page) {
        if ((here_[page] & 1) == 0) return nullptr;
      }
      return data_ + (at - begin_);
    }

   private:
    friend class FilePages;
    const char* data_ = nullptr;
    uint64_t begin_ = 0;
    uint64_t end_ = 0;
    std::array<unsigned char, kMostBytes / kPageBytes> here_;
  };
  // Asks what of the file [begin, end), at most kMostBytes once both are rounded to pages, is in memory: one system call,
  // of about a microsecond. False: it cannot be told.
  bool Ask(uint64_t begin, uint64_t end, Range* range);

 private:
  // One mapping for the first bytes of the file, and one more each time that it doubles.
  static constexpr int kFirstBits = 24;
  static constexpr size_t kWindows = 24;

  const char* Window(size_t window, size_t bytes, uint64_t offset);

  const int file_;
  std::array<std::atomic<char*>, kWindows> windows_ = {};
  std::atomic<bool> failed_;
  std::mutex mutex_;  // of who maps
};

}  // namespace kvtable
