// One shard's part of an export of one moment: which of its rows are still to come, and copies of those that
// changed before their turn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "eviction/rank.h"
#include "kvtable/table.h"
#include "memory/huge_pages.h"
#include "table/row_store.h"
#include "table/shard_changes.h"

namespace kvtable {

// What stands before a row's bytes in a block of rows that were put aside.
struct AsideRow {
  RowStamp stamp;
  Rank rank;
  uint64_t born;  // whether after the version that the export begins from
};

// Copies of rows. Its memory is counted for as long as it is there.
class AsideBlock {
 public:
  AsideBlock(std::shared_ptr<AsideMemory> memory, int64_t row_bytes);
  ~AsideBlock();
  AsideBlock(const AsideBlock&) = delete;
  AsideBlock& operator=(const AsideBlock&) = delete;

  bool full() const { return count_ == capacity_; }
  int64_t count() const { return count_; }
  AsideRow* Row(int64_t i) const { return reinterpret_cast<AsideRow*>(data_.data() + i * record_bytes_); }
  static const char* Bytes(const AsideRow* row) { return reinterpret_cast<const char*>(row + 1); }
  void Add(const AsideRow& head, const char* bytes, int64_t row_bytes) {
    char* const to = data_.data() + count_++ * record_bytes_;
    std::memcpy(to, &head, sizeof(head));
    std::memcpy(to + sizeof(head), bytes, static_cast<size_t>(row_bytes));
  }

 private:
  const std::shared_ptr<AsideMemory> memory_;
  int64_t record_bytes_;
  int64_t capacity_;
  int64_t count_ = 0;
  Region data_;
};

// What all shards of an export share.
struct Moment {
  std::shared_ptr<AsideMemory> memory;
  // The rank of the row at a position; null: the table keeps none.
  std::function<Rank(uint64_t)> rank_of;
  // Set when it was given up because nobody took its rows: then nothing is put aside any more.
  std::atomic<bool> given_up{false};
  // Set when all rows have come, or the exporter goes.
  std::atomic<bool> ended{false};

  bool over() const {
    return given_up.load(std::memory_order_relaxed) || ended.load(std::memory_order_relaxed);
  }
};

// Guarded by the shard's lock. Who holds it shared may read, and may Take rows; a row is Taken once.
class ShardMoment {
 public:
  ShardMoment(const std::shared_ptr<Moment>& whole, int shard) : whole_(whole), shard_(shard) {}

  // Memory for rows [0, rows). Before Begin, and without the lock.
  void Prepare(uint32_t rows) {
    if (rows > prepared_) {
      taken_ = Region((size_t{rows} + 63) / 64 * sizeof(uint64_t), Pages::kOrdinary, "an export's bits");
      prepared_ = rows;
    }
  }
  uint32_t prepared() const { return prepared_; }
  // From now on rows [0, end) are those of the moment; only the changed ones, where `changes` are given.
  void Begin(uint32_t end) noexcept { end_ = end; }
  void SetChanges(std::vector<std::shared_ptr<const ShardChanges>> changes) {
    changes_ = std::move(changes);
    all_ = false;
  }
  void AddChanges(std::shared_ptr<const ShardChanges> changes) noexcept {
    changes_.push_back(std::move(changes));
  }

  uint32_t end() const { return end_; }
  bool all() const { return all_; }
  const std::vector<std::shared_ptr<const ShardChanges>>& changes() const { return changes_; }

  // Whether the row, if it is live, is still to come from the table itself.
  bool Wants(uint32_t row) const {
    if (row >= end_) return false;
    if ((__atomic_load_n(Word(row), __ATOMIC_RELAXED) >> (row % 64) & 1) != 0) return false;
    return all_ || Changed(row);
  }
  void Take(uint32_t row) noexcept {
    __atomic_fetch_or(Word(row), uint64_t{1} << (row % 64), __ATOMIC_RELAXED);
  }
  bool Born(uint32_t row) const {
    for (const auto& changes : changes_) {
      if (changes->born.Has(row)) return true;
    }
    return false;
  }

  // A row is about to change, or to go; or a new one is about to be written there.
  void Before(const RowStore& rows, uint32_t row, bool is_new) {
    if (!Wants(row) || whole_->given_up.load(std::memory_order_relaxed)) return;
    if (!is_new) PutAside(rows, row);
    Take(row);
  }

  // The blocks of rows put aside since the last call.
  std::deque<std::unique_ptr<AsideBlock>> TakeAside() noexcept { return std::move(aside_); }
  bool has_aside() const { return !aside_.empty(); }

  // Calls visit(row) for the live rows that are still to come, from `begin` on and in order, until it returns
  // false. Returns the first row not visited: end() at the end.
  template <class Visit>
  uint32_t ForEach(const RowStore& rows, uint32_t begin, const Visit& visit) const {
    const uint32_t end = end_ < rows.high_water() ? end_ : rows.high_water();
    if (begin >= end) return end_;
    if (all_) {
      const uint32_t at =
          rows.ForEachLive(begin, end, [&](uint32_t row) { return !Wants(row) || visit(row); });
      return at < end ? at : end_;
    }
    for (uint32_t row = begin; row < end;) {
      uint64_t word = 0;
      bool any = false;
      for (const auto& changes : changes_) {
        const RowSet::Chunk* const chunk = changes->changed.ChunkAt(row >> RowSet::kChunkBits);
        if (chunk == nullptr) continue;
        any = true;
        word |= (*chunk)[row / 64 % RowSet::kChunkWords];
      }
      if (!any) {
        row = (row / RowSet::kChunkRows + 1) * RowSet::kChunkRows;
        continue;
      }
      for (word = word >> (row % 64) << (row % 64); word != 0; word &= word - 1) {
        row = row / 64 * 64 + static_cast<uint32_t>(__builtin_ctzll(word));
        if (row >= end) return end_;
        if (rows.IsLive(row) && Wants(row) && !visit(row)) return row;
      }
      row = row / 64 * 64 + 64;
    }
    return end_;
  }

 private:
  bool Changed(uint32_t row) const {
    for (const auto& changes : changes_) {
      if (changes->changed.Has(row)) return true;
    }
    return false;
  }
  uint64_t* Word(uint32_t row) const { return reinterpret_cast<uint64_t*>(taken_.data()) + row / 64; }
  void PutAside(const RowStore& rows, uint32_t row);

  const std::shared_ptr<Moment> whole_;
  const int shard_;
  Region taken_;  // a bit for each row that came already, went aside, or was not there at the moment
  uint32_t prepared_ = 0;
  uint32_t end_ = 0;
  bool all_ = true;
  std::vector<std::shared_ptr<const ShardChanges>> changes_;
  std::deque<std::unique_ptr<AsideBlock>> aside_;
};

}  // namespace kvtable
