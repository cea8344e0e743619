// The file in which a table keeps the rows that its memory has no room for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "spill/file_pages.h"

namespace kvtable {

// Scratch, and nobody else's: it has no name in its folder from the moment it is there, so it goes with its table, also
// where the process is killed, and nothing in the folder is ever read or overwritten. Any thread.
//
// Space is taken before rows are written to it, so a disk that fills up is an error there and not of a later write. Writes
// are plain pwrite, and reads are pread but where the system has the page: an error of the disk is an error of the call, and
// no signal, but where the system gives a page up in the moment between.
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
  // Reads all of them: what the system has in memory from there, where many that follow one another are close
  // together without a call for each; the rest with as many under way at once as the disk takes. Throws Error(kFailedPrecondition).
  void Read(const Piece* pieces, size_t count) const;
  // The bytes where they are in memory; null where not all of them are.
  const char* InMemory(uint64_t offset, size_t bytes) const;

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
  // How many pieces there have to be in a range of the file so that it pays to ask what of it is in memory.
  static constexpr size_t kAsksFor = 3;
  static constexpr size_t kPiecesAhead = 10;

  // Reads those of pieces [begin, end) that are in memory; the others are listed in `waiting`: how many.
  static size_t ReadMapped(const FilePages::Range& pages, const Piece* pieces, size_t begin, size_t end,
                           uint32_t* waiting);
  void ReadPiece(const Piece& piece) const;
  bool Punch(uint64_t offset, size_t bytes) noexcept;
  int64_t PunchFree();        // gives what is free back to the disk: how many bytes
  std::string Named() const;  // the table and the folder

  const std::string folder_;
  const std::string table_;
  const int64_t max_memory_;
  const int shards_;
  int file_ = -1;
  mutable std::optional<FilePages> pages_;
  std::atomic<int64_t> bytes_{0};
  std::mutex mutex_;  // guards what follows
  uint64_t end_ = 0;
  int64_t free_bytes_ = 0;                         // of free_
  std::map<size_t, std::vector<uint64_t>> free_;   // by size: released, with their disk space
  std::map<size_t, std::vector<uint64_t>> holes_;  // released, without
};

}  // namespace kvtable
