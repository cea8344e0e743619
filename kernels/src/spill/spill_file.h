// The file in which a table keeps the rows that its memory has no room for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace kvtable {

// Scratch, and nobody else's: it has no name in its folder from the moment it is there, so it goes with its table, also
// where the process is killed, and nothing in the folder is ever read or overwritten. Any thread.
//
// Space is taken before rows are written to it, so a disk that fills up is an error there and not of a later write. Reads
// and writes are plain pread and pwrite: an error of the disk is an error of the call, and no signal.
class SpillFile {
 public:
  // Throws Error(kInvalidArgument) that says what is wrong with the folder.
  SpillFile(std::string folder, std::string table, int64_t max_memory, int shards);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // Where `bytes` may be written from now on. Throws Error(kResourceExhausted).
  uint64_t Allocate(size_t bytes);
  void Release(uint64_t offset, size_t bytes) noexcept;

  // Throws Error(kResourceExhausted); the contents of the range are undefined then.
  void Write(uint64_t offset, const char* from, size_t bytes);

  struct Piece {
    uint64_t offset;
    char* to;
    size_t bytes;
  };
  // Reads all of them, with as many under way at once as the disk takes: what the system has in memory comes first, the
  // rest is asked for before it is waited for. Throws Error(kFailedPrecondition).
  void Read(const Piece* pieces, size_t count) const;

  // That a row came back other than it went. Throws Error(kFailedPrecondition).
  [[noreturn]] void ThrowDamaged() const;
  // That the memory of one of the table's shards, all of which have the same, would have to be `least` bytes. Throws
  // Error(kInvalidArgument).
  [[noreturn]] void ThrowTooSmall(int64_t least) const;

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }  // of disk that are taken
  // Rows so far: brought into memory or looked up in the file, and written to it.
  mutable std::atomic<int64_t> rows_read{0};
  std::atomic<int64_t> rows_written{0};

 private:
  void ReadPiece(const Piece& piece) const;
  bool Punch(uint64_t offset, size_t bytes) noexcept;
  int64_t PunchFree();        // gives what is free back to the disk: how many bytes
  std::string Named() const;  // the table and the folder

  const std::string folder_;
  const std::string table_;
  const int64_t max_memory_;
  const int shards_;
  int file_ = -1;
  std::atomic<int64_t> bytes_{0};
  std::mutex mutex_;  // guards what follows
  uint64_t end_ = 0;
  int64_t free_bytes_ = 0;                         // of free_
  std::map<size_t, std::vector<uint64_t>> free_;   // by size: released, with their disk space
  std::map<size_t, std::vector<uint64_t>> holes_;  // released, without
};

}  // namespace kvtable
