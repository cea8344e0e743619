// Reads the rows of a ShardedTable in the order in which they lie.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/table.h"

namespace kvtable {

class ShardedTable;

class TableExporter : public Exporter {
 public:
  explicit TableExporter(const ShardedTable* table);
  int64_t max_rows() const override;
  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override;

 private:
  template <class Key>
  int64_t Write(const uint64_t* picks, int64_t count, int64_t at, const Buffers& out) const;

  const ShardedTable* table_;
  std::vector<uint32_t> ends_;  // of each shard: row numbers handed out when the export began
  int shard_ = 0;
  uint32_t row_ = 0;
};

}  // namespace kvtable
