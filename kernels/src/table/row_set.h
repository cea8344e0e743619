// A set of row numbers of one shard.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvtable {

// A bit per row, in chunks that come to be with their first row: memory and the time to go through it follow
// what is in the set, and not how many rows the shard has.
class RowSet {
 public:
  static constexpr int kChunkBits = 12;
  static constexpr uint32_t kChunkRows = 1u << kChunkBits;
  static constexpr int kChunkWords = kChunkRows / 64;
  using Chunk = std::array<uint64_t, kChunkWords>;

  // Makes sure that Add(row) cannot fail. Throws std::bad_alloc.
  void Prepare(uint32_t row) {
    const size_t at = row >> kChunkBits;
    if (at >= chunks_.size()) chunks_.resize(at + 1);
    if (chunks_[at] == nullptr) chunks_[at] = std::make_unique<Chunk>();
  }
  void Add(uint32_t row) noexcept {  // needs Prepare(row)
    uint64_t& word = (*chunks_[row >> kChunkBits])[row / 64 % kChunkWords];
    const uint64_t bit = uint64_t{1} << (row % 64);
    count_ += (word & bit) == 0 ? 1 : 0;
    word |= bit;
  }
  bool Has(uint32_t row) const {
    const Chunk* const chunk = ChunkAt(row >> kChunkBits);
    return chunk != nullptr && ((*chunk)[row / 64 % kChunkWords] >> (row % 64) & 1) != 0;
  }

  // The bits of rows [at, at + 1) * kChunkRows, or null where there are none.
  const Chunk* ChunkAt(size_t at) const { return at < chunks_.size() ? chunks_[at].get() : nullptr; }

  int64_t count() const { return count_; }
  int64_t bytes() const {
    int64_t bytes = static_cast<int64_t>(chunks_.capacity() * sizeof(chunks_[0]));
    for (const auto& chunk : chunks_) bytes += chunk == nullptr ? 0 : static_cast<int64_t>(sizeof(Chunk));
    return bytes;
  }

 private:
  std::vector<std::unique_ptr<Chunk>> chunks_;
  int64_t count_ = 0;
};

}  // namespace kvtable
