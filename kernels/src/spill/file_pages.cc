#include "spill/file_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "spill/file_calls.h"

namespace kvtable {
namespace {

// Where a window begins, and how many bytes it has.
uint64_t Begin(size_t window, int first_bits) {
  return window == 0 ? 0 : uint64_t{1} << (first_bits + static_cast<int>(window) - 1);
}
size_t Bytes(size_t window, int first_bits) {
  return size_t{1} << (window == 0 ? first_bits : first_bits + static_cast<int>(window) - 1);
}

}  // namespace

FilePages::FilePages(int file) : file_(file), failed_(::sysconf(_SC_PAGESIZE) != kPageBytes) {}

FilePages::~FilePages() {
  for (size_t w = 0; w < kWindows; ++w) {
    if (char* const data = windows_[w].load()) ::munmap(data, Bytes(w, kFirstBits));
  }
}

const char* FilePages::Window(size_t window, size_t bytes, uint64_t offset) {
  char* data = windows_[window].load(std::memory_order_acquire);
  if (data != nullptr || failed_.load(std::memory_order_relaxed)) return data;
  std::lock_guard<std::mutex> hold(mutex_);
  data = windows_[window].load(std::memory_order_relaxed);
  if (data != nullptr || failed_.load(std::memory_order_relaxed)) return data;
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file_, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) {
    failed_.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  data = static_cast<char*>(mapped);
  windows_[window].store(data, std::memory_order_release);
  return data;
}

bool FilePages::Ask(uint64_t begin, uint64_t end, Range* range) {
  range->begin_ = begin / kPageBytes * kPageBytes;
  range->end_ = range->begin_;
  const uint64_t above = begin >> kFirstBits;
  const size_t window = above == 0 ? 0 : 64 - static_cast<size_t>(__builtin_clzll(above));
  if (window >= kWindows) return false;
  const uint64_t window_begin = Begin(window, kFirstBits);
  const size_t window_bytes = Bytes(window, kFirstBits);
  const char* const data = Window(window, window_bytes, window_begin);
  if (data == nullptr) return false;
  end = std::min(end, window_begin + window_bytes);  // what lies beyond is not of the range
  range->data_ = data + (range->begin_ - window_begin);
  const size_t bytes = (end - range->begin_ + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (SpillCalls().in_memory(const_cast<char*>(range->data_), bytes, range->here_.data()) != 0) return false;
  range->end_ = range->begin_ + bytes;
  return true;
}

}  // namespace kvtable
