#include "local_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "errors.h"
#include "tensorflow/core/platform/path.h"

namespace kvtools {

namespace tf = tensorflow;

// Has linkage, as LocalReader::Buffer has: units include this file.
struct Freed {
  void operator()(char* bytes) const { std::free(bytes); }
};
using Block = std::unique_ptr<char, Freed>;

namespace {

// What addresses, offsets and sizes past the page cache are multiples of: no disk wants more.
constexpr int64_t kDiskBlock = 4096;
constexpr int64_t kMostWriteBytes = int64_t{4} << 20;
constexpr int64_t kWriteBuffersBytes = int64_t{32} << 20;  // of all writers
// Where all writers together have less of the disk than this, the page cache is faster for as long as it has room.
constexpr double kLeastBytesPerSecond = 400e6;
constexpr int64_t kJudgedBytes = int64_t{32} << 20;
constexpr int64_t kMostReadBytes = int64_t{1} << 20;

Block MakeBlock(int64_t bytes) {
  return Block(static_cast<char*>(std::aligned_alloc(kDiskBlock, static_cast<size_t>(bytes))));
}

// The path of a name, or "" where another file system than the local one has it.
std::string LocalPath(const std::string& name) {
  absl::string_view scheme, host, path;
  tf::io::ParseURI(name, &scheme, &host, &path);
  return scheme.empty() || scheme == "file" ? std::string(path) : "";
}

class LocalFile : public tf::WritableFile {
 public:
  LocalFile(std::string path, int descriptor, int writers)
      : path_(std::move(path)),
        descriptor_(descriptor),
        writers_(writers),
        room_(std::max(int64_t{64} << 10,
                       std::min(kMostWriteBytes, kWriteBuffersBytes / writers) / kDiskBlock * kDiskBlock)),
        buffer_(MakeBlock(room_)) {}
  ~LocalFile() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  absl::Status Append(absl::string_view data) override {
    if (buffer_ == nullptr) return errors::ResourceExhausted(path_, ": no memory for ", room_, " bytes");
    while (!data.empty()) {
      const auto piece = std::min(data.size(), static_cast<size_t>(room_ - filled_));
      std::memcpy(buffer_.get() + filled_, data.data(), piece);
      filled_ += static_cast<int64_t>(piece);
      data.remove_prefix(piece);
      if (filled_ < room_) break;
      if (offset_ >= kInCache && way_ == Way::kUndecided) TryDirect();
      const absl::Status written = Write(0, room_);
      if (!written.ok()) return written;
      filled_ = 0;
    }
    return absl::OkStatus();
  }

  absl::Status Flush() override { return absl::OkStatus(); }

  absl::Status Sync() override {
    const absl::Status written = WriteRest();
    return written.ok() && ::fsync(descriptor_) != 0 ? Failed() : written;
  }

  absl::Status Close() override {
    if (descriptor_ < 0) return absl::OkStatus();
    absl::Status status = WriteRest();
    if (::close(std::exchange(descriptor_, -1)) != 0 && status.ok()) status = Failed();
    return status;
  }

 private:
  enum class Way { kUndecided, kDirect, kCached };
  using Clock = std::chrono::steady_clock;

  absl::Status Failed() const { return absl::ErrnoToStatus(errno, path_); }

  void TryDirect() {
    const int flags = ::fcntl(descriptor_, F_GETFL);
    way_ = flags >= 0 && ::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) == 0 ? Way::kDirect : Way::kCached;
  }

  void GoCached() {
    way_ = Way::kCached;
    const int flags = ::fcntl(descriptor_, F_GETFL);
    if (flags >= 0) ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT);
  }

  // What is left in the buffer, and is no whole number of blocks.
  absl::Status WriteRest() {
    if (filled_ == 0) return absl::OkStatus();
    const int64_t whole = filled_ / kDiskBlock * kDiskBlock;
    absl::Status written = Write(0, whole);
    if (way_ == Way::kDirect) GoCached();
    if (written.ok()) written = Write(whole, filled_ - whole);
    filled_ = 0;
    return written;
  }

  // Bytes [from, from + size) of the buffer, at the file's end.
  absl::Status Write(int64_t from, int64_t size) {
    const Clock::time_point begin = Clock::now();
    for (const int64_t end = from + size; from < end;) {
      const ssize_t n = ::pwrite(descriptor_, buffer_.get() + from, static_cast<size_t>(end - from), offset_);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EINVAL && way_ == Way::kDirect) {  // a file system that lets it be asked for only
        GoCached();
        continue;
      }
      if (n < 0) return Failed();
      from += n;
      offset_ += n;
      if (way_ == Way::kDirect && n % kDiskBlock != 0)
        GoCached();  // the next piece would begin within a block
    }
    if (way_ != Way::kDirect || judged_) return absl::OkStatus();
    direct_bytes_ += size;
    direct_seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
    if (direct_bytes_ < kJudgedBytes) return absl::OkStatus();
    judged_ = true;
    if (static_cast<double>(direct_bytes_) * writers_ < kLeastBytesPerSecond * direct_seconds_) GoCached();
    return absl::OkStatus();
  }

  const std::string path_;
  int descriptor_;
  const int writers_;
  const int64_t room_;
  const Block buffer_;
  int64_t filled_ = 0;
  int64_t offset_ = 0;  // of the buffer in the file
  Way way_ = Way::kUndecided;
  bool judged_ = false;
  int64_t direct_bytes_ = 0;
  double direct_seconds_ = 0;
};

}  // namespace

absl::Status NewLocalFile(const std::string& name, int writers, std::unique_ptr<tf::WritableFile>* file) {
  const std::string path = LocalPath(name);
  if (path.empty()) return absl::OkStatus();
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return absl::ErrnoToStatus(errno, path);
  *file = std::make_unique<LocalFile>(path, descriptor, std::max(1, writers));
  return absl::OkStatus();
}

class LocalReader::Buffer {
 public:
  Buffer() : block(MakeBlock(kMostReadBytes + 2 * kDiskBlock)) {}
  const Block block;
};

std::unique_ptr<LocalReader> LocalReader::Open(const std::string& name) {
  const std::string path = LocalPath(name);
  if (path.empty()) return nullptr;
  const int cached = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (cached < 0) return nullptr;  // TensorFlow says why
  struct stat found;
  const bool is_file = ::fstat(cached, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 0;
  const int direct = is_file ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
  void* mapped = MAP_FAILED;
  if (direct >= 0)
    mapped = ::mmap(nullptr, static_cast<size_t>(found.st_size), PROT_READ, MAP_SHARED, cached, 0);
  if (mapped == MAP_FAILED) {
    if (direct >= 0) ::close(direct);
    ::close(cached);
    return nullptr;
  }
  return std::unique_ptr<LocalReader>(new LocalReader(cached, direct, found.st_size, mapped));
}

LocalReader::LocalReader(int cached, int direct, int64_t size, void* mapped)
    : cached_(cached), direct_(direct), size_(size), mapped_(mapped) {}

LocalReader::~LocalReader() {
  ::munmap(mapped_, static_cast<size_t>(size_));
  ::close(direct_);
  ::close(cached_);
}

std::unique_ptr<LocalReader::Buffer> LocalReader::TakeBuffer() {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (buffers_.empty()) return std::make_unique<Buffer>();
  std::unique_ptr<Buffer> buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

// Where the system does not say, which it need not to who may not write the file: that it is.
bool LocalReader::IsInCache(int64_t offset, int64_t size) const {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  unsigned char in_cache[kMostReadBytes / 4096 + 2];
  const int64_t begin = offset / page * page;
  const int64_t pages = (offset + size - begin + page - 1) / page;
  if (::mincore(static_cast<char*>(mapped_) + begin, static_cast<size_t>(offset + size - begin), in_cache) !=
      0) {
    return true;
  }
  return std::all_of(in_cache, in_cache + pages, [](unsigned char one) { return (one & 1) != 0; });
}

absl::Status LocalReader::ReadPast(int64_t offset, int64_t size, char* out) {
  std::unique_ptr<Buffer> buffer = TakeBuffer();
  char* const block = buffer->block.get();
  const int64_t begin = offset / kDiskBlock * kDiskBlock;
  const int64_t wanted = (offset + size - begin + kDiskBlock - 1) / kDiskBlock * kDiskBlock;
  ssize_t got = -1;
  if (block != nullptr) {
    do {
      got = ::pread(direct_, block, static_cast<size_t>(wanted), begin);
    } while (got < 0 && errno == EINTR);
  }
  const int64_t usable = got - (offset - begin);
  if (usable >= size) std::memcpy(out, block + (offset - begin), static_cast<size_t>(size));
  const std::lock_guard<std::mutex> hold(mutex_);
  buffers_.push_back(std::move(buffer));
  return usable >= size ? absl::OkStatus() : absl::UnavailableError("");
}

absl::Status LocalReader::Read(int64_t offset, int64_t size, char* out) {
  if (offset < 0 || size < 0 || offset > size_ || size > size_ - offset) {
    return errors::DataLoss("the data file ends before it");
  }
  while (size > 0) {
    int64_t piece = std::min(size, kMostReadBytes);
    if (IsInCache(offset, piece) || !ReadPast(offset, piece, out).ok()) {
      const ssize_t n = ::pread(cached_, out, static_cast<size_t>(piece), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::ErrnoToStatus(errno, "reading it");
      if (n == 0) return errors::DataLoss("the data file ends before it");
      piece = n;
    }
    offset += piece;
    size -= piece;
    out += piece;
  }
  return absl::OkStatus();
}

}  // namespace kvtools
