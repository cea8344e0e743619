// Memory of a given size that is returned to the system when its owner goes, on huge pages where they help.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtable {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kHugePage = size_t{2} << 20;

enum class Pages : uint8_t {
  kOrdinary,
  kHuge,
  kHugeOnceFull,  // ordinary pages until Collapse(): for memory that may never be used up
};

// A zeroed, 64-byte aligned run of memory. Small regions come from the heap (a model may have hundreds of
// tables, and a process only 65,530 mappings); larger ones are mapped, touched lazily, and given back as soon
// as the region goes. Where huge pages are wanted, the region is aligned to them and on them, but for a rest
// of less than half of one at its end.
class Region {
 public:
  Region() = default;
  // Throws Error(kResourceExhausted) that names `what` and how many bytes it wanted.
  Region(size_t bytes, Pages pages, const char* what);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }

  // Moves the contents to huge pages, at the same addresses. A kernel that cannot (before 6.1) leaves all as
  // it is.
  void Collapse();

  // Bytes of physical memory behind the first `used` bytes, once they have been written.
  size_t TouchedBytes(size_t used) const;

 private:
  char* data_ = nullptr;
  size_t size_ = 0;        // bytes asked for
  size_t mapped_ = 0;      // bytes mapped; 0: from the heap
  size_t huge_bytes_ = 0;  // bytes at the front that may be on huge pages
  bool huge_ = false;      // and are
};

}  // namespace kvtable
