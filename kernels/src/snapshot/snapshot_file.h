// An open snapshot's bytes: mapped, and watched for being cut or written over.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "snapshot/format.h"

namespace kvtable {

// Where a fault of memory may come from, for the handler of SIGBUS. They are never freed: a handler may be
// looking at one while its file is closed.
struct GuardedRange {
  std::atomic<uintptr_t> begin{0};  // 0: nobody's
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> gone{false};  // a page of it could not be read
  GuardedRange* next = nullptr;
};

class SnapshotFile {
 public:
  // Maps the file, whatever is in it. Throws Error(kFailedPrecondition) where the system refuses.
  explicit SnapshotFile(const std::string& path);
  ~SnapshotFile();
  SnapshotFile(const SnapshotFile&) = delete;
  SnapshotFile& operator=(const SnapshotFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }
  const std::string& identity() const { return identity_; }
  const uint8_t* data() const { return data_; }

  // Notes the header, by which this content is told from another, and the last bytes that are not zero.
  void Remember(const snapshot_format::Header& header);
  const snapshot_format::Header& header() const { return header_; }

  // Lets the disk begin with what will be read there. Unlike madvise, it takes no lock that others wait for.
  void AskFor(const uint8_t* data, int64_t bytes) const;

  // See Snapshot::CheckUnchanged.
  void CheckUnchanged() const;

  // The same after each lookup, without a system call: the header as it is mapped, which has the checksum of all
  // checksums and is written first by whatever writes over a file, and the last bytes, which go where a file is cut.
  // A file that has become longer is left to CheckUnchanged.
  void CheckMapped() const;

  std::vector<uint32_t> checksums;  // of each mebibyte of each section, table after table
  // Of each of them, whether it was compared with its checksum and holds. Only a hint: it may be so and not be told.
  mutable std::vector<std::atomic<bool>> sound;
  std::string description;            // JSON
  std::atomic<bool> warm{false};      // Populate came to its end
  std::atomic<bool> resident{false};  // and has read all rows
  std::atomic<bool> verify_on_use{false};
  // What was found damaged on use, empty as long as nothing is. Under `damage_mutex`.
  mutable std::mutex damage_mutex;
  mutable std::string damage;
  // Whether what lookups read seems to be on the disk: they then ask for it ahead of use. Only a hint.
  mutable std::atomic<bool> cold{true};

 private:
  [[noreturn]] void ThrowChanged() const;

  static constexpr size_t kTailBytes = 8;

  std::string path_;
  std::string identity_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  uint8_t* data_ = nullptr;
  GuardedRange* range_ = nullptr;
  mutable std::atomic<int64_t> modified_{0};  // nanoseconds
  snapshot_format::Header header_{};
  const uint8_t* tail_at_ = nullptr;  // null: not known, or there is nothing in the last page that could go
  uint8_t tail_[kTailBytes] = {};
};

}  // namespace kvtable
