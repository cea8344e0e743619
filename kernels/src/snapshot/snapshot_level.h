// Rows that lie over a table of a snapshot: those that changed since, and the keys that went. In memory, immutable.
//
// What an increment of a chain says is one level. Levels merge, so that there are few of them, each some times as
// large as the next newer one: a row is copied some times on its way into the next file, whatever the table's size.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/snapshot.h"
#include "kvtable/types.h"
#include "memory/huge_pages.h"
#include "snapshot/mixed_index.h"

namespace kvtable {

class SnapshotLevel {
 public:
  static constexpr int64_t kUnknown = -1;  // the level says nothing of the key

  // What changed in `table`: the rows `values` (n, dim) of `keys` (n), in the table's own type, and the keys `removed`
  // (m), of which those that are among `keys`, too, are there. Keys are 64-bit patterns.
  //
  // Throws Error(kInvalidArgument) where a key comes twice, or the table's rows are quantized.
  static std::shared_ptr<const SnapshotLevel> Make(const SnapshotTable& table, const int64_t* keys, int64_t n,
                                                   const void* values, const int64_t* removed, int64_t m);

  // Both as one; what `newer` says counts. A key that went stays known to have gone.
  static std::shared_ptr<const SnapshotLevel> Merge(const SnapshotLevel& older, const SnapshotLevel& newer);

  KeyType key_type() const { return key_type_; }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t entries() const { return static_cast<int64_t>(keys_.size()); }
  int64_t removed() const { return entries() - rows_kept_; }
  int64_t bytes() const;

  // The entries of `n` keys, at most kGroup, or kUnknown.
  void Find(const int64_t* keys, int n, int64_t* entries) const;

  // The row of an entry; null: its key has gone.
  const uint8_t* Row(int64_t entry) const {
    const uint32_t place = places_[static_cast<size_t>(entry)];
    return place == kRemoved ? nullptr : rows() + place * row_bytes_;
  }
  const uint64_t* mixed_keys() const { return keys_.data(); }

 private:
  static constexpr uint32_t kRemoved = UINT32_MAX;

  SnapshotLevel(KeyType key_type, int64_t row_bytes) : key_type_(key_type), row_bytes_(row_bytes) {}
  static std::shared_ptr<SnapshotLevel> New(KeyType key_type, int64_t row_bytes);
  const uint8_t* rows() const { return reinterpret_cast<const uint8_t*>(rows_.data()); }
  void MakeDirectory();

  KeyType key_type_;
  int64_t row_bytes_;
  int64_t rows_kept_ = 0;
  std::vector<uint64_t> keys_;       // mixed, rising
  std::vector<uint32_t> places_;     // of each key: where its row lies, or kRemoved
  std::vector<uint32_t> directory_;  // (buckets + 1)
  Region rows_;                      // (rows_kept_, row_bytes_)
};

// The rows of a table and of what lies over it, in the order of their mixed keys.
class MergedRows {
 public:
  // `level` may be null.
  MergedRows(const SnapshotTable& table, const SnapshotLevel* level) : table_(table), level_(level) {}

  // The next row that is there; false where there is none.
  bool Next(uint64_t* mixed, const uint8_t** row);

 private:
  const SnapshotTable& table_;
  const SnapshotLevel* level_;
  int64_t in_table_ = 0;
  int64_t in_level_ = 0;
};

// All levels of a table as one; null where it has none.
std::shared_ptr<const SnapshotLevel> MergedLevel(const SnapshotTable& table);

}  // namespace kvtable
