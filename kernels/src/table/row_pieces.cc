#include "table/row_pieces.h"

#include <algorithm>
#include <utility>

namespace kvtable {

RowPieces::RowPieces(int64_t row_bytes, std::shared_ptr<SharedPages> pages)
    : row_bytes_(row_bytes), pages_(std::move(pages)) {
  while ((size_t{2} << piece_bits_) * static_cast<size_t>(row_bytes) <= pages_->piece_bytes()) ++piece_bits_;
  piece_bytes_ = ((size_t{1} << piece_bits_) * static_cast<size_t>(row_bytes) + kPage - 1) / kPage * kPage;
}

void RowPieces::Grow() {
  SharedPages::Piece piece = pages_->Take(piece_bytes_);
  if (regions_.empty() || regions_.back() != piece.of) regions_.push_back(std::move(piece.of));
  at_.push_back(reinterpret_cast<uintptr_t>(piece.data) -
                static_cast<uintptr_t>(capacity()) * static_cast<uintptr_t>(row_bytes_));
}

void RowPieces::Clear() {
  at_.clear();
  at_.shrink_to_fit();
  regions_.clear();
  regions_.shrink_to_fit();
}

void RowPieces::GiveBackPieceOf(uint32_t row) noexcept {
  SharedPages::GiveBack(Row(row >> piece_bits_ << piece_bits_), piece_bytes_);
}

size_t RowPieces::TouchedBytes(uint32_t used) const {
  if (used == 0) return 0;
  const size_t before = static_cast<size_t>((used - 1) >> piece_bits_);
  const size_t page = before == 0 ? kPage : kHugePage;
  const size_t in_last = (used - (before << piece_bits_)) * static_cast<size_t>(row_bytes_);
  return before * piece_bytes_ + std::min((in_last + page - 1) / page * page, piece_bytes_);
}

}  // namespace kvtable
