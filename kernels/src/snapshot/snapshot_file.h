// An open snapshot's bytes: mapped, and watched for being cut or written over.
//
// The system notes when a file is written to before it changes a byte. (Of one who stores to a mapping of the file it
// notes the first store to a page, and on tmpfs none.) So what is read of the mapping is what was
// there before, if the file's times are the same after it was read. Where they are others, the file has a new
// *generation*: whatever was compared with its checksum before counts as not compared, and is compared before its next
// use (`verify_on_use`) until all of it has been. A file whose header or size is another is gone for good.
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
  // See Snapshot::identity.
  std::string identity() const;
  bool IsAt(const std::string& path) const;
  const uint8_t* data() const { return data_; }

  // Notes the header, by which this content is told from another, and the last bytes that are not zero.
  void Remember(const snapshot_format::Header& header);
  const snapshot_format::Header& header() const { return header_; }

  // Lets the disk begin with what will be read there. Unlike madvise, it takes no lock that others wait for.
  void AskFor(const uint8_t* data, int64_t bytes) const;

  // Rises by 1 whenever the file turns out to have been written to, touched or given other attributes.
  uint32_t generation() const { return generation_.load(std::memory_order_acquire); }

  // Looks whether the file was written to. Throws Error(kFailedPrecondition) where it is gone: it was cut, or has
  // another header.
  void Look() const;

  // See Snapshot::CheckUnchanged.
  void CheckUnchanged() const;

  // Calls `read` until what it has read of the mapping is of one generation, and that of now. Throws what
  // CheckUnchanged does. It asks nobody on another machine: of a file there it sees what this one knows.
  template <class Read>
  void Reading(const Read& read) const {
    uint32_t generation;
    do {
      generation = this->generation();
      read();
    } while (!IsStill(generation));
  }

  // Sleeps until it is some time since the file was seen to have been written to.
  void AwaitQuiet() const;

  // Ends `verify_on_use`, if the file is of this generation, of which all was compared. Returns whether it is.
  bool EndVerifyOnUse(uint32_t generation) const;
  // The same where its identity is still this one.
  bool EndVerifyOnUse(const std::string& identity) const;

  std::vector<uint32_t> checksums;  // of each mebibyte of each section, table after table
  // Of each of them, the last generation in which it was compared with its checksum, and holds; 0: none. Only a hint: it
  // may be so and not be told.
  mutable std::vector<std::atomic<uint32_t>> sound;
  std::string description;            // JSON
  std::atomic<bool> warm{false};      // Populate came to its end
  std::atomic<bool> resident{false};  // and has read all rows
  mutable std::atomic<bool> verify_on_use{false};
  // What was found damaged on use in this generation, empty as long as nothing is. Under `damage_mutex`, which is taken
  // with `state_mutex_` or without.
  mutable std::mutex damage_mutex;
  mutable std::string damage;
  // Whether what lookups read seems to be on the disk: they then ask for it ahead of use. Only a hint.
  mutable std::atomic<bool> cold{true};

 private:
  // What the system notes of a file, times in nanoseconds.
  struct State {
    int64_t bytes = 0;
    int64_t modified = 0;
    int64_t changed = 0;
    int64_t links = 0;
    bool operator==(const State& other) const {
      return bytes == other.bytes && modified == other.modified && changed == other.changed &&
             links == other.links;
    }
  };

  // False where it cannot be had. Without `ask`, as far as this machine knows.
  bool ReadState(bool ask, State* state) const;
  void LookAt(bool ask) const;
  void Note(const State& state) const;
  void ThrowIfWritten() const;
  bool IsStill(uint32_t generation) const;
  std::string IdentityLocked() const;
  [[noreturn]] void ThrowChanged() const;

  static constexpr size_t kTailBytes = 8;

  std::string path_;
  std::string file_;  // which one it is: device, inode, time of its birth
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  uint8_t* data_ = nullptr;
  GuardedRange* range_ = nullptr;
  // What follows changes under `state_mutex_`, the generation last.
  mutable std::mutex state_mutex_;
  mutable State state_;
  mutable std::atomic<int64_t> modified_{0}, changed_{0}, links_{0};  // those of `state_`, for a first look
  mutable std::atomic<int64_t> written_at_{0};  // when it was last seen to have been written to; steady clock
  mutable std::atomic<int64_t> quiet_{0};  // nanoseconds from then on in which it may be written to unseen
  mutable std::atomic<uint32_t> generation_{1};
  snapshot_format::Header header_{};
  const uint8_t* tail_at_ = nullptr;  // null: not known, or there is nothing in the last page that could go
  uint8_t tail_[kTailBytes] = {};
};

}  // namespace kvtable
