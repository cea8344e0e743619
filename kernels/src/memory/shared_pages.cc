#include "memory/shared_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace kvtable {
namespace {

constexpr size_t kMostAtOnce = size_t{256} << 20;  // of address space: a process has 65,530 mappings

}  // namespace

SharedPages::SharedPages(int owners, bool huge_pages, const char* what)
    : piece_bytes_(std::max(kOfAllOwners / static_cast<size_t>(owners) / kPage * kPage, kPage)),
      huge_pages_(huge_pages),
      what_(what) {}

SharedPages::Piece SharedPages::Take(size_t bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  std::shared_ptr<Region> region = open_.lock();
  if (region == nullptr) taken_ = 0;
  if (region == nullptr || used_ + bytes > region->size()) {
    const bool first = taken_ == 0;
    const size_t wanted = std::max(bytes, first ? kOfAllOwners : std::min(taken_, kMostAtOnce));
    const Pages pages = !huge_pages_ ? Pages::kOrdinary : first ? Pages::kHugeOnceFull : Pages::kHuge;
    auto next = std::make_shared<Region>((wanted + kHugePage - 1) / kHugePage * kHugePage, pages, what_);
    if (region != nullptr) region->Collapse();  // the first one; others are on huge pages already
    region = std::move(next);
    open_ = region;
    used_ = 0;
  }
  char* const data = region->data() + used_;
  used_ += bytes;
  taken_ += bytes;
  return {data, std::move(region)};
}

void SharedPages::GiveBack(char* data, size_t bytes) noexcept { ::madvise(data, bytes, MADV_DONTNEED); }

size_t SharedPages::idle_bytes() const {
  std::lock_guard<std::mutex> hold(mutex_);
  const std::shared_ptr<Region> region = open_.lock();
  return region == nullptr ? 0 : region->TouchedBytes(used_) - used_;
}

}  // namespace kvtable
