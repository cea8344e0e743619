// Pieces of memory for several owners, side by side on huge pages: where each had pages of its own, most of the last one
// of each would lie idle.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "memory/huge_pages.h"

namespace kvtable {

class SharedPages {
 public:
  // `what` is named where the system refuses memory.
  SharedPages(int owners, bool huge_pages, const char* what);

  // What an owner should take at a time: about kOfAllOwners, if each takes one.
  size_t piece_bytes() const { return piece_bytes_; }

  struct Piece {
    char* data;
    std::shared_ptr<Region> of;  // its memory goes when no piece is left
  };
  // A zeroed piece that is touched as it is written; `bytes` is a multiple of kPage. The first piece of each owner lies on
  // ordinary pages until one of them takes a second, so that owners of little take little. Throws
  // Error(kResourceExhausted) or std::bad_alloc.
  Piece Take(size_t bytes);

  // Gives a piece back to the system, though others of its region are still in use.
  static void GiveBack(char* data, size_t bytes) noexcept;

  // Bytes of pages that were touched for pieces, and that no piece has.
  size_t idle_bytes() const;

 private:
  static constexpr size_t kOfAllOwners = size_t{4} << 20;

  mutable std::mutex mutex_;
  const size_t piece_bytes_;
  const bool huge_pages_;
  const char* const what_;
  std::weak_ptr<Region> open_;  // the last one; gone where all of its pieces are
  size_t used_ = 0;             // bytes of it that pieces have
  size_t taken_ = 0;            // by all pieces since there was a first
};

}  // namespace kvtable
