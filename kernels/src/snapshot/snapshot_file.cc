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
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr int64_t kLetGo = int64_t{4} << 20;    // bytes of a piece
constexpr std::chrono::milliseconds kPause{1};  // after each
// ns. Longer than a tick of the clock by which the system notes times, within which two writes have the same.
constexpr int64_t kQuiet = int64_t{50} * 1000 * 1000;
constexpr int64_t kQuietOfSeconds = int64_t{2100} * 1000 * 1000;  // ns, where times are whole seconds or two
constexpr int64_t kAlike = int64_t{1000} * 1000 * 1000;           // ns
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

// One that has the inode of another that was removed is another one.
std::string FileOf(int descriptor, const struct stat& status) {
  int64_t born = 0;
#if defined(STATX_BTIME)
  struct statx more = {};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_BTIME, &more) == 0 && (more.stx_mask & STATX_BTIME) != 0)
    born = more.stx_btime.tv_sec * int64_t{1000000000} + more.stx_btime.tv_nsec;
#else
  static_cast<void>(descriptor);
#endif
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino) + ":" + std::to_string(born);
}

int64_t SteadyNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
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
  state_ = {bytes_, Nanoseconds(status.st_mtim), Nanoseconds(status.st_ctim),
            static_cast<int64_t>(status.st_nlink)};
  modified_.store(state_.modified);
  changed_.store(state_.changed);
  links_.store(state_.links);
  file_ = FileOf(descriptor_, status);
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

bool SnapshotFile::ReadState(bool ask, State* state) const {
#if defined(AT_STATX_DONT_SYNC)
  struct statx more = {};
  constexpr unsigned kAsked = STATX_SIZE | STATX_MTIME | STATX_CTIME | STATX_NLINK;
  if (!ask && statx(descriptor_, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, kAsked, &more) == 0 &&
      (more.stx_mask & kAsked) == kAsked) {
    const auto nanoseconds = [](const struct statx_timestamp& time) {
      return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
    };
    *state = {static_cast<int64_t>(more.stx_size), nanoseconds(more.stx_mtime), nanoseconds(more.stx_ctime),
              static_cast<int64_t>(more.stx_nlink)};
    return true;
  }
#else
  static_cast<void>(ask);
#endif
  struct stat status = {};
  if (fstat(descriptor_, &status) != 0) return false;
  *state = {status.st_size, Nanoseconds(status.st_mtim), Nanoseconds(status.st_ctim),
            static_cast<int64_t>(status.st_nlink)};
  return true;
}

void SnapshotFile::LookAt(bool ask) const {
  if (range_ == nullptr) return;
  if (range_->gone.load(std::memory_order_acquire)) ThrowChanged();
  State state;
  if (ReadState(ask, &state) && state.bytes == bytes_) {
    if (state.modified == modified_.load(std::memory_order_acquire) &&
        state.changed == changed_.load(std::memory_order_acquire) &&
        state.links == links_.load(std::memory_order_acquire)) {
      return;
    }
    // Another snapshot has another header, which has the checksum of all checksums.
    snapshot_format::Header header = {};
    if (pread(descriptor_, &header, sizeof(header), 0) == sizeof(header) &&
        std::memcmp(&header, &header_, sizeof(header)) == 0) {
      Note(state);
      return;
    }
  }
  range_->gone.store(true);
  ThrowChanged();
}

void SnapshotFile::Note(const State& state) const {
  const std::lock_guard<std::mutex> hold(state_mutex_);
  if (state == state_) return;
  const bool is_written = state.modified != state_.modified;
  // Names that come and go, as where another file is renamed to its path, are no writing.
  const bool is_linked = !is_written && state.links != state_.links;
  // Who writes sets both times alike; who gives a file another time, as who copies with times, is done.
  if (is_written && std::abs(state.modified - state.changed) < kAlike) {
    const bool in_seconds = state.modified % kAlike == 0 && state.changed % kAlike == 0;
    quiet_.store(in_seconds ? kQuietOfSeconds : kQuiet);
    written_at_.store(SteadyNow());
  }
  state_ = state;
  if (!is_linked) {
    verify_on_use.store(true, std::memory_order_release);
    const std::lock_guard<std::mutex> hold_damage(damage_mutex);  // what was damaged before is told no more
    damage.clear();
    generation_.fetch_add(1, std::memory_order_acq_rel);
  }
  modified_.store(state.modified);  // whoever sees these sees the generation
  changed_.store(state.changed);
  links_.store(state.links);
}

void SnapshotFile::ThrowIfWritten() const {
  const int64_t at = written_at_.load(std::memory_order_acquire);
  if (at == 0 || SteadyNow() - at >= quiet_.load()) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "reading '" + path_ +
                  "': it was written over or touched just now, and may be being written; try again, and "
                  "replace a snapshot by renaming another one to its name");
}

void SnapshotFile::Look() const { LookAt(true); }

void SnapshotFile::CheckUnchanged() const {
  LookAt(true);
  ThrowIfWritten();
}

void SnapshotFile::AwaitQuiet() const {
  for (int64_t at = written_at_.load(); at != 0; at = written_at_.load()) {
    const int64_t left = quiet_.load() - (SteadyNow() - at);
    if (left <= 0) return;
    std::this_thread::sleep_for(std::chrono::nanoseconds(left));
  }
}

bool SnapshotFile::EndVerifyOnUse(uint32_t generation) const {
  const std::lock_guard<std::mutex> hold(state_mutex_);
  if (generation_.load() != generation) return false;
  verify_on_use.store(false, std::memory_order_release);
  return true;
}

bool SnapshotFile::EndVerifyOnUse(const std::string& identity) const {
  const std::lock_guard<std::mutex> hold(state_mutex_);
  if (IdentityLocked() != identity) return false;
  verify_on_use.store(false, std::memory_order_release);
  return true;
}

std::string SnapshotFile::IdentityLocked() const {
  std::string identity = file_;
  for (const int64_t number :
       {state_.bytes, state_.modified, state_.changed, static_cast<int64_t>(header_.header_crc)}) {
    identity += ":" + std::to_string(number);
  }
  return identity;
}

std::string SnapshotFile::identity() const {
  const std::lock_guard<std::mutex> hold(state_mutex_);
  return IdentityLocked();
}

bool SnapshotFile::IsAt(const std::string& path) const {
  struct stat here = {}, there = {};
  return fstat(descriptor_, &here) == 0 && stat(path.c_str(), &there) == 0 && here.st_dev == there.st_dev &&
         here.st_ino == there.st_ino;  // an inode in use is nobody else's
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

// The header as it is mapped is written first by whatever writes over a file, and the last bytes go where one is cut.
bool SnapshotFile::IsStill(uint32_t generation) const {
  if (range_ == nullptr) return true;
#ifndef __SANITIZE_THREAD__                             // which knows no fences
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read of the file was read before
#endif
  const bool same = tail_at_ == nullptr || (std::memcmp(data_, &header_, sizeof(header_)) == 0 &&
                                            std::memcmp(tail_at_, tail_, sizeof(tail_)) == 0);
  if (!same) range_->gone.store(true);
  LookAt(false);
  ThrowIfWritten();
  return this->generation() == generation;
}

void SnapshotFile::ThrowChanged() const {
  throw Error(ErrorCode::kFailedPrecondition, "reading '" + path_ +
                                                  "': it was cut or written over since it was opened, or the "
                                                  "disk does not give it; open it again, and "
                                                  "replace a snapshot by renaming another one to its name");
}

}  // namespace kvtable
