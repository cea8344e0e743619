#include "snapshot/snapshot_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr int64_t kLetGo = int64_t{4} << 20;         // bytes of a piece
constexpr std::chrono::milliseconds kPause{1};       // after each
constexpr int64_t kLetGoAtOnce = int64_t{16} << 20;  // bytes that take less time than a thread for them does

std::mutex registering;
std::atomic<GuardedRange*> ranges{nullptr};
uintptr_t page_bytes = 4096;
struct sigaction previous_action;
// The thread whose signal is with the one who handled it before. No thread_local: a handler may not allocate, and one
// that needs no allocating (initial-exec) has the loader find static room for all that the library and those linked into
// it, such as CUDA's runtime, keep for each thread: there is too little, and the library cannot be loaded.
std::atomic<pid_t> chained{0};

// A mapped page that the file no longer has, or that the disk does not give, is a SIGBUS. Where it is one of a
// snapshot, pages of zeros take its place and that of all behind it, and the file counts as gone: whoever read
// there looks at that before it answers. Everything else goes to whoever handled the signal before.
void OnBusError(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (GuardedRange* range = ranges.load(std::memory_order_acquire); info->si_code > 0 && range != nullptr;
       range = range->next) {
    const uintptr_t begin = range->begin.load(std::memory_order_acquire);
    const uintptr_t end = range->end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    const int error = errno;
    range->gone.store(true, std::memory_order_seq_cst);
    const uintptr_t page = address & ~(page_bytes - 1);
    void* const zeros = mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    errno = error;
    if (zeros != MAP_FAILED) return;
  }
  const bool takes_info = (previous_action.sa_flags & SA_SIGINFO) != 0;
  const bool is_function =
      takes_info || (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN);
  auto self = static_cast<pid_t>(syscall(SYS_gettid));
  if (is_function && chained.load() != self) {  // who raises it again means it
    chained.store(self);
    if (takes_info) {
      previous_action.sa_sigaction(signal, info, context);
    } else {
      previous_action.sa_handler(signal);
    }
    chained.compare_exchange_strong(self, 0);
    return;
  }
  struct sigaction fall = {};  // the read is made again when this returns, and ends the process
  fall.sa_handler = SIG_DFL;
  sigaction(signal, &fall, nullptr);
  if (info->si_code <= 0) raise(signal);
}

// Under `registering`. Looks each time: whoever took the signal since may not hand it on.
void InstallHandler() {
  struct sigaction now = {};
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
      now.sa_sigaction == OnBusError) {
    return;
  }
  struct sigaction ours = {};
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  ours.sa_sigaction = OnBusError;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGBUS, &ours, &now) == 0) previous_action = now;
}

GuardedRange* Guard(const void* data, int64_t bytes) {
  const std::lock_guard<std::mutex> hold(registering);
  InstallHandler();
  GuardedRange* range = ranges.load();
  while (range != nullptr && range->begin.load() != 0) range = range->next;
  const bool is_new = range == nullptr;
  if (is_new) range = new GuardedRange;  // for good: see GuardedRange
  range->gone.store(false);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  range->end.store((begin + static_cast<uintptr_t>(bytes) + page_bytes - 1) & ~(page_bytes - 1));
  range->begin.store(begin);
  if (is_new) {
    range->next = ranges.load();
    ranges.store(range, std::memory_order_release);
  }
  return range;
}

// Gives the memory back, and closes the file. A gigabyte takes some ten milliseconds: it is let go piece by piece, with
// pauses, by a thread of its own, and not by whoever used it last, which may be the one that answers all
// requests. The thread has the usual priority: what it holds in the kernel others wait for.
void LetGo(uint8_t* data, int64_t bytes, int descriptor) {
  for (int64_t first = 0; first < bytes; first += kLetGo) {
    madvise(data + first, static_cast<size_t>(std::min(kLetGo, bytes - first)), MADV_DONTNEED);
    std::this_thread::sleep_for(kPause);
  }
  munmap(data, static_cast<size_t>(bytes));
  close(descriptor);
}

void Release(GuardedRange* range) {
  const std::lock_guard<std::mutex> hold(registering);
  range->begin.store(0);
}

int64_t Nanoseconds(const struct timespec& time) { return time.tv_sec * int64_t{1000000000} + time.tv_nsec; }

// A file that is only touched stays the same; one that has the inode of another that was removed has not.
std::string IdentityOf(int descriptor, const struct stat& status) {
  int64_t born = 0;
#if defined(STATX_BTIME)
  struct statx more = {};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_BTIME, &more) == 0 && (more.stx_mask & STATX_BTIME) != 0)
    born = more.stx_btime.tv_sec * int64_t{1000000000} + more.stx_btime.tv_nsec;
#else
  static_cast<void>(descriptor);
#endif
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino) + ":" +
         std::to_string(status.st_size) + ":" + std::to_string(born);
}

[[noreturn]] void ThrowSystem(const std::string& path, int error) {
  throw Error(ErrorCode::kFailedPrecondition,
              "opening '" + path + "': " + std::strerror(error) + "; name a file that can be read");
}

}  // namespace

SnapshotFile::SnapshotFile(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) ThrowSystem(path, errno);
  struct stat status = {};
  const bool known = fstat(descriptor_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    const int error = known ? (S_ISDIR(status.st_mode) ? EISDIR : EINVAL) : errno;
    close(descriptor_);
    ThrowSystem(path, error);
  }
  bytes_ = status.st_size;
  modified_.store(Nanoseconds(status.st_mtim));
  identity_ = IdentityOf(descriptor_, status);
  if (bytes_ == 0) return;
  void* const data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(descriptor_);
    ThrowSystem(path, error);
  }
  data_ = static_cast<uint8_t*>(data);
  range_ = Guard(data_, bytes_);
}

SnapshotFile::~SnapshotFile() {
  if (range_ != nullptr) Release(range_);
  if (bytes_ > kLetGoAtOnce) {
    try {
      std::thread(LetGo, data_, bytes_, descriptor_).detach();
      return;
    } catch (const std::system_error&) {  // no thread to be had
    }
  }
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
  close(descriptor_);
}

void SnapshotFile::AskFor(const uint8_t* data, int64_t bytes) const {
  posix_fadvise(descriptor_, data - data_, bytes, POSIX_FADV_WILLNEED);
}

void SnapshotFile::CheckUnchanged() const {
  if (range_ == nullptr) return;
  if (range_->gone.load(std::memory_order_acquire)) ThrowChanged();
  struct stat status = {};
  if (fstat(descriptor_, &status) == 0) {
    const int64_t modified = Nanoseconds(status.st_mtim);
    if (status.st_size == bytes_ && modified == modified_.load(std::memory_order_relaxed)) return;
    // Touched, or written over: the header has the checksum of all checksums.
    snapshot_format::Header header = {};
    if (status.st_size == bytes_ && pread(descriptor_, &header, sizeof(header), 0) == sizeof(header) &&
        std::memcmp(&header, &header_, sizeof(header)) == 0) {
      modified_.store(modified, std::memory_order_relaxed);
      return;
    }
  }
  range_->gone.store(true);
  ThrowChanged();
}

void SnapshotFile::Remember(const snapshot_format::Header& header) {
  header_ = header;
  // Where a file is cut in the middle of its last page, what is behind that becomes zeros, and pages go otherwise.
  const uint8_t* const last_page = data_ + (bytes_ - 1) / static_cast<int64_t>(page_bytes) * page_bytes;
  const uint8_t* end = data_ + bytes_;
  while (end > last_page && end[-1] == 0) --end;
  tail_at_ = end == last_page ? last_page : end - kTailBytes;  // there is a header before it
  std::memcpy(tail_, tail_at_, sizeof(tail_));
}

void SnapshotFile::CheckMapped() const {
  if (range_ == nullptr) return;
  if (tail_at_ == nullptr) return CheckUnchanged();
#ifndef __SANITIZE_THREAD__                             // which knows no fences
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read of the file was read before
#endif
  const bool same =
      std::memcmp(data_, &header_, sizeof(header_)) == 0 && std::memcmp(tail_at_, tail_, sizeof(tail_)) == 0;
  if (same && !range_->gone.load(std::memory_order_acquire)) return;
  range_->gone.store(true);
  ThrowChanged();
}

void SnapshotFile::ThrowChanged() const {
  throw Error(ErrorCode::kFailedPrecondition, "reading '" + path_ +
                                                  "': it was cut or written over since it was opened, or the "
                                                  "disk does not give it; open it again, and "
                                                  "replace a snapshot by renaming another one to its name");
}

}  // namespace kvtable
