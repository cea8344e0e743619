// Reads the rows of a ShardedTable in the order in which they lie.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/table.h"
#include "table/reused_rows.h"

namespace kvtable {

struct Shard;
class ShardedTable;

class TableExporter : public Exporter {
 public:
  explicit TableExporter(const ShardedTable* table);
  int64_t max_rows() const override;
  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override;

 private:
  const ShardedTable* table_;
  // The rows that a shard had when the export began. Guarded by the shard's lock.
  class RowsOfShard {
   public:
    explicit RowsOfShard(Shard* shard);
    ~RowsOfShard();
    RowsOfShard(const RowsOfShard&) = delete;
    RowsOfShard& operator=(const RowsOfShard&) = delete;

    uint32_t end() const { return reused_->end(); }
    bool Has(uint32_t row) const { return !reused_->Has(row); }

   private:
    Shard* const shard_;
    std::unique_ptr<ReusedRows> reused_;
  };
  std::vector<std::unique_ptr<RowsOfShard>> rows_;  // of each shard
  int shard_ = 0;
  uint32_t row_ = 0;
};

}  // namespace kvtable
