#include "ranks/shared_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr int64_t kLeastBytes = 64 << 10;
constexpr int64_t kSteps = 8;      // sizes between two powers of two
constexpr int64_t kMostWaste = 2;  // a free buffer may have so many times what is wanted

// Sizes of batches differ a little from step to step: rounded up, one buffer fits them all.
int64_t Rounded(int64_t bytes) {
  int64_t power = kLeastBytes;
  while (power < bytes) power *= 2;
  const int64_t step = std::max(kLeastBytes, power / 2 / kSteps);
  return (std::max<int64_t>(bytes, 1) + step - 1) / step * step;
}

}  // namespace

SharedBuffer::SharedBuffer(uint64_t number, int64_t bytes) : number_(number), bytes_(bytes) {
  const auto fail = [&](const char* what) {
    std::string why = std::strerror(errno);
    if (errno == EMFILE || errno == ENFILE) why += ", see ulimit -n";
    if (file_ >= 0) close(file_);
    throw Error(ErrorCode::kResourceExhausted, "no " + std::to_string(bytes) +
                                                   " bytes of memory that other ranks can read (" + what +
                                                   ": " + why + ")");
  };
  file_ = memfd_create("kvtools", MFD_CLOEXEC);
  if (file_ < 0) fail("memfd_create");
  // Memory that is not there would be a SIGBUS of whoever writes, and not an error.
  if (const int error = posix_fallocate(file_, 0, bytes); error != 0) {
    errno = error;
    fail("fallocate");
  }
  void* const data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
  if (data == MAP_FAILED) fail("mmap");
  data_ = static_cast<char*>(data);
}

SharedBuffer::~SharedBuffer() {
  munmap(data_, static_cast<size_t>(bytes_));
  CloseFile();
}

void SharedBuffer::CloseFile() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

std::shared_ptr<SharedBuffer> SharedBuffers::Take(int64_t bytes) {
  std::unique_ptr<SharedBuffer> buffer;
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const int64_t has = it->buffer->bytes();
      if (has < bytes || has > kMostWaste * Rounded(bytes)) continue;
      if (best == free_.end() || has < best->buffer->bytes()) best = it;
    }
    if (best != free_.end()) {
      buffer = std::move(best->buffer);
      free_.erase(best);
    } else {
      number = next_number_++;
    }
  }
  if (buffer == nullptr) buffer = std::make_unique<SharedBuffer>(number, Rounded(bytes));
  const std::lock_guard<std::mutex> hold(mutex_);
  SharedBuffer* const taken = buffer.release();
  const std::shared_ptr<SharedBuffer> held(
      taken, [pool = shared_from_this()](SharedBuffer* back) { pool->GiveBack(back); });
  taken_[taken->data()] = held;
  return held;
}

std::shared_ptr<SharedBuffer> SharedBuffers::Holding(const char* data, int64_t bytes) const {
  std::shared_ptr<SharedBuffer> buffer;  // may come to be the last, and then goes without the lock
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    auto it = taken_.upper_bound(data);
    if (it == taken_.begin()) return nullptr;
    buffer = (--it)->second.lock();
  }
  if (buffer == nullptr || data + bytes > buffer->data() + buffer->bytes()) return nullptr;
  return buffer;
}

void SharedBuffers::GiveBack(SharedBuffer* buffer) {
  const std::lock_guard<std::mutex> hold(mutex_);
  taken_.erase(buffer->data());
  free_.push_back({std::unique_ptr<SharedBuffer>(buffer), Clock::now()});
}

SharedBuffers::Idle SharedBuffers::DropIdle(Clock::duration idle_for) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const Clock::time_point since = Clock::now() - idle_for;
  const auto dropped =
      std::partition(free_.begin(), free_.end(), [&](const Free& one) { return one.since > since; });
  Idle idle;
  for (auto it = dropped; it != free_.end(); ++it) idle.push_back(std::move(it->buffer));
  free_.erase(dropped, free_.end());
  return idle;
}

}  // namespace kvtable
