// Where the rows of one shard lie. A row, once it has a place, never moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/shared_pages.h"

namespace kvtable {

// Pieces of a power of two of rows each, on pages that the shards of a table share.
class RowPieces {
 public:
  RowPieces(int64_t row_bytes, std::shared_ptr<SharedPages> pages);

  int64_t row_bytes() const { return row_bytes_; }
  uint64_t capacity() const { return uint64_t{at_.size()} << piece_bits_; }  // rows that have places
  char* Row(uint32_t row) const {
    return reinterpret_cast<char*>(at_[row >> piece_bits_] + row * static_cast<uintptr_t>(row_bytes_));
  }

  // Makes places for some more rows. Throws Error(kResourceExhausted) or std::bad_alloc, and has changed nothing then.
  void Grow();
  void Clear();
  // How many rows from `row` on lie one behind the other.
  uint32_t Run(uint32_t row) const { return (1u << piece_bits_) - (row & ((1u << piece_bits_) - 1)); }
  // Gives the memory of a row's piece back to the system: its rows are read no more.
  void GiveBackPieceOf(uint32_t row) noexcept;

  // Bytes of memory behind the first `used` rows.
  size_t TouchedBytes(uint32_t used) const;

 private:
  // Addresses from which row * size leads to the row: the piece's memory less what earlier ones hold. Numbers, because no
  // pointer may lie outside its array.
  std::vector<uintptr_t> at_;
  int64_t row_bytes_;
  int piece_bits_ = 0;  // of the rows in a piece
  size_t piece_bytes_;  // whole pages
  std::vector<std::shared_ptr<Region>> regions_;
  std::shared_ptr<SharedPages> pages_;
};

}  // namespace kvtable
