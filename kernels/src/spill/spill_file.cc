#include "spill/spill_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kvtable/types.h"
#include "memory/copy_rows.h"
#include "memory/scratch.h"
#include "spill/file_calls.h"

namespace kvtable {
namespace {

ssize_t ReadAtOnce(int file, void* to, size_t bytes, off_t offset) {
  iovec piece = {to, bytes};
  return ::preadv2(file, &piece, 1, offset, RWF_NOWAIT);
}

std::string SystemText(int error) {
  return std::strerror(error);  // of glibc, whose messages of known errors are constants
}

// Without a name from the first moment on, or, where the file system cannot, from the second.
int OpenNameless(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = folder + "/.kvtools-spill-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

FileCalls& SpillCalls() {
  static FileCalls calls = {::pread, ReadAtOnce, ::pwrite, ::posix_fallocate, ::mincore};
  return calls;
}

std::string SpillFile::Named() const {
  return "Table '" + table_ + "' keeps rows in a file in its spill folder '" + folder_ + "'";
}

SpillFile::SpillFile(std::string folder, std::string table, int64_t max_memory, int shards)
    : folder_(std::move(folder)), table_(std::move(table)), max_memory_(max_memory), shards_(shards) {
  const auto refuse = [this](int error, const char* way_out) {
    throw Error(ErrorCode::kInvalidArgument, "Table '" + table_ + "' cannot keep rows in its spill folder '" +
                                                 folder_ + "': " + SystemText(error) + ". " + way_out);
  };
  struct stat found = {};
  if (::stat(folder_.c_str(), &found) != 0) {
    refuse(errno, "Make the folder, on a local disk, or name another in spill=.");
  }
  if (!S_ISDIR(found.st_mode)) refuse(ENOTDIR, "Name a folder on a local disk in spill=, not a file.");
  file_ = OpenNameless(folder_);
  if (file_ < 0) refuse(errno, "Name a folder on a local disk in spill= in which this process may write.");
  ::posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // nothing is read ahead
  pages_.emplace(file_);
}

SpillFile::~SpillFile() { ::close(file_); }

uint64_t SpillFile::Allocate(size_t bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<uint64_t>& ready = free_[bytes];
  if (!ready.empty()) {
    const uint64_t offset = ready.back();
    ready.pop_back();
    free_bytes_ -= static_cast<int64_t>(bytes);
    return offset;
  }
  std::vector<uint64_t>& holes = holes_[bytes];
  const uint64_t offset = holes.empty() ? end_ : holes.back();
  int error = SpillCalls().allocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error == ENOSPC && PunchFree() > 0) {
    error = SpillCalls().allocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
  if (error != 0) {
    Punch(offset, bytes);  // what came of it before the disk was full goes back
    throw Error(
        ErrorCode::kResourceExhausted,
        Named() + ", and found no room for " + std::to_string(bytes) + " bytes more beside " +
            std::to_string(this->bytes()) + ": " + SystemText(error) +
            ". Nothing is lost: the rows that are there can be looked up and saved. Make room on that disk "
            "and go on; or save, and restore into a table with a larger max_memory= or another spill=.");
  }
  if (holes.empty()) {
    end_ += bytes;
  } else {
    holes.pop_back();
  }
  bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  return offset;
}

bool SpillFile::Punch(uint64_t offset, size_t bytes) noexcept {
  return ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes)) == 0;
}

int64_t SpillFile::PunchFree() {
  int64_t punched = 0;
  for (auto& [bytes, offsets] : free_) {
    std::vector<uint64_t>& holes = holes_[bytes];
    holes.reserve(holes.size() + offsets.size());
    while (!offsets.empty() && Punch(offsets.back(), bytes)) {
      holes.push_back(offsets.back());
      offsets.pop_back();
      const int64_t size = static_cast<int64_t>(bytes);
      free_bytes_ -= size;
      bytes_.fetch_sub(size, std::memory_order_relaxed);
      punched += size;
    }
  }
  return punched;
}

void SpillFile::Release(uint64_t offset, size_t bytes) noexcept {
  std::lock_guard<std::mutex> hold(mutex_);
  try {
    const int64_t size = static_cast<int64_t>(bytes);
    free_[bytes].push_back(offset);
    free_bytes_ += size;
    // Some are kept for the next who asks; what a shrinking table leaves goes back to the disk.
    if (4 * free_bytes_ > this->bytes()) PunchFree();
  } catch (...) {  // no memory to remember it: the space goes with the file
  }
}

void SpillFile::Write(uint64_t offset, const char* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t wrote =
        SpillCalls().write(file_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (wrote > 0) {
      done += static_cast<size_t>(wrote);
      continue;
    }
    const int error = wrote == 0 ? ENOSPC : errno;
    if (error == EINTR) continue;
    throw Error(
        ErrorCode::kResourceExhausted,
        Named() + ", and could not write " + std::to_string(bytes - done) +
            " bytes to it: " + SystemText(error) +
            ". Nothing is lost: the rows that are there can be looked up and saved. See to that disk and go "
            "on; or save, and restore into a table with a larger max_memory= or another spill=.");
  }
}

void SpillFile::ReadPiece(const Piece& piece) const {
  for (size_t done = 0; done < piece.bytes;) {
    const ssize_t read = SpillCalls().read(file_, piece.to + done, piece.bytes - done,
                                           static_cast<off_t>(piece.offset + done));
    if (read > 0) {
      done += static_cast<size_t>(read);
      continue;
    }
    const int error = read == 0 ? EIO : errno;
    if (error == EINTR) continue;
    throw Error(
        ErrorCode::kFailedPrecondition,
        Named() + ", and could not read " + std::to_string(piece.bytes - done) +
            " bytes of it: " + SystemText(error) +
            ". The rows in memory are whole, those in the file are read anew when they are asked for again. "
            "Where the disk has failed, restore the last checkpoint into a table with another spill=.");
  }
}

void SpillFile::Read(const Piece* pieces, size_t count) const {
  Scratch<uint32_t> waiting(count);
  size_t left = 0;
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    // Pieces one behind the other, as far as one question reaches.
    const uint64_t first = pieces[begin].offset / FilePages::kPageBytes * FilePages::kPageBytes;
    uint64_t last = pieces[begin].offset;
    for (end = begin; end < count; ++end) {
      if (pieces[end].offset < last || pieces[end].offset + pieces[end].bytes > first + FilePages::kMostBytes)
        break;
      last = pieces[end].offset + pieces[end].bytes;
    }
    FilePages::Range pages;
    if (end - begin >= kAsksFor && pages_->Ask(first, last, &pages)) {
      left += ReadMapped(pages, pieces, begin, end, waiting.data() + left);
      continue;
    }
    end = std::max(end, begin + 1);
    for (size_t i = begin; i < end; ++i) {
      const ssize_t read = SpillCalls().read_at_once(file_, pieces[i].to, pieces[i].bytes,
                                                     static_cast<off_t>(pieces[i].offset));
      if (read != static_cast<ssize_t>(pieces[i].bytes)) waiting[left++] = static_cast<uint32_t>(i);
    }
  }
  for (size_t i = 0; left > 1 && i < left; ++i) {
    const Piece& piece = pieces[waiting[i]];
    ::posix_fadvise(file_, static_cast<off_t>(piece.offset), static_cast<off_t>(piece.bytes),
                    POSIX_FADV_WILLNEED);
  }
  for (size_t i = 0; i < left; ++i) ReadPiece(pieces[waiting[i]]);
}

size_t SpillFile::ReadMapped(const FilePages::Range& pages, const Piece* pieces, size_t begin, size_t end,
                             uint32_t* waiting) {
  size_t left = 0;
  for (size_t i = begin; i < end; ++i) {
    if (i + kPiecesAhead < end) {
      const Piece& next = pieces[i + kPiecesAhead];
      if (const char* const from = pages.Find(next.offset, next.bytes)) {
        PrefetchRow<kAnyBytes>(from, static_cast<int64_t>(next.bytes));
      }
    }
    if (const char* const from = pages.Find(pieces[i].offset, pieces[i].bytes)) {
      std::memcpy(pieces[i].to, from, pieces[i].bytes);
    } else {
      waiting[left++] = static_cast<uint32_t>(i);
    }
  }
  return left;
}

const char* SpillFile::InMemory(uint64_t offset, size_t bytes) const {
  if (offset % FilePages::kPageBytes + bytes > FilePages::kMostBytes) return nullptr;
  FilePages::Range pages;
  return pages_->Ask(offset, offset + bytes, &pages) ? pages.Find(offset, bytes) : nullptr;
}

void SpillFile::ThrowDamaged() const {
  throw Error(
      ErrorCode::kFailedPrecondition,
      Named() +
          ", and a row came back from it other than it was written (its checksum differs). The disk, or "
          "whoever "
          "else has written to it, has damaged it: restore the last checkpoint into a table with another "
          "spill=.");
}

void SpillFile::ThrowTooSmall(int64_t least) const {
  throw Error(
      ErrorCode::kInvalidArgument,
      Named() + ", and a max_memory of " + std::to_string(max_memory_) +
          " bytes is less than it can work with. Rows as wide as its (slots included) need max_memory=" +
          std::to_string(least * shards_) + " at least.");
}

}  // namespace kvtable
