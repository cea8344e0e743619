#include "memory/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "kvtable/types.h"

// Linux 6.1; older headers lack it.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvtable {
namespace {

constexpr size_t kMapFrom = size_t{256} << 10;
constexpr std::align_val_t kAlignment{64};

size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

[[noreturn]] void ThrowExhausted(size_t bytes, const char* what) {
  throw Error(ErrorCode::kResourceExhausted, "The system refused " + std::to_string(bytes) + " bytes for " +
                                                 what +
                                                 ". Free memory, raise the process's limit, or partition the "
                                                 "table over more processes.");
}

}  // namespace

Region::Region(size_t bytes, Pages pages, const char* what) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 4) ThrowExhausted(bytes, what);
  if (bytes < kMapFrom) {
    data_ = static_cast<char*>(::operator new(bytes, kAlignment, std::nothrow));
    if (data_ == nullptr) ThrowExhausted(bytes, what);
    std::memset(data_, 0, bytes);
    return;
  }
  huge_bytes_ = pages == Pages::kOrdinary ? 0 : (bytes + kHugePage / 2) / kHugePage * kHugePage;
  mapped_ = std::max(huge_bytes_, RoundUp(bytes, kPage));
  const size_t padded = mapped_ + (huge_bytes_ > 0 ? kHugePage : 0);
  void* address =
      ::mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    mapped_ = 0;
    ThrowExhausted(bytes, what);
  }
  char* begin = static_cast<char*>(address);
  if (huge_bytes_ == 0) {
    data_ = begin;
    return;
  }
  // Keep the aligned middle, give the ends back.
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  data_ = begin + before;
  if (before > 0) ::munmap(begin, before);
  if (kHugePage > before) ::munmap(data_ + mapped_, kHugePage - before);
  // A kernel without transparent huge pages refuses; ordinary pages do as well, only slower.
  huge_ = pages == Pages::kHuge && ::madvise(data_, huge_bytes_, MADV_HUGEPAGE) == 0;
}

void Region::Collapse() {
  if (huge_ || huge_bytes_ == 0) return;
  huge_ = ::madvise(data_, huge_bytes_, MADV_COLLAPSE) == 0;
}

Region::~Region() {
  if (data_ == nullptr) return;
  if (mapped_ > 0) {
    ::munmap(data_, mapped_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(huge_bytes_, other.huge_bytes_);
  std::swap(huge_, other.huge_);
  return *this;
}

size_t Region::TouchedBytes(size_t used) const {
  used = std::min(used, size_);
  if (used == 0) return 0;
  if (mapped_ == 0) return size_;
  if (huge_ && used <= huge_bytes_) return RoundUp(used, kHugePage);
  return std::min(mapped_, RoundUp(used, kPage));
}

}  // namespace kvtable
