// Reads the rows of a ShardedTable as they were at one moment.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/table.h"
#include "table/shard_moment.h"

namespace kvtable {

class ShardedTable;

// Rows come from the table, in the order in which they lie, and from what was put aside, that first.
//
// `mutex_` guards what is below it: where the reading has got to, and the blocks put aside. Copying goes on
// without it, so several threads may read. It is taken before any lock of the table.
class MomentExporter : public Exporter {
 public:
  // `shards` are registered with the table's shards, `moment` has entered its gate; both leave with this.
  MomentExporter(ShardedTable* table, std::shared_ptr<Moment> moment,
                 std::shared_ptr<const std::vector<std::unique_ptr<ShardMoment>>> shards, uint64_t version);
  ~MomentExporter() override;

  int64_t max_rows() const override;
  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override;
  bool IsUrgent() const override { return 2 * moment_->memory->used() > moment_->memory->limit(); }
  void KeepAlive() override { moment_->memory->NoteProgress(); }
  uint64_t version() const override { return version_; }
  int64_t born_rows() const override;
  int64_t removed_rows() const override;
  void RemovedKeys(void* keys) const override;

 private:
  // Rows to be copied, as shard << 32 | row, or, where they were put aside, the rows themselves.
  struct Picks {
    std::vector<uint64_t> rows;
    std::vector<const AsideRow*> aside;
    std::vector<std::shared_ptr<const AsideBlock>> blocks;  // hold `aside`
  };
  Picks Pick(int64_t capacity);
  void PickAside(int64_t capacity, Picks* picks);
  int64_t CopyRows(const std::vector<uint64_t>& rows, const Buffers& out, ParallelFor& threads);
  void CopyAside(const std::vector<const AsideRow*>& rows, const Buffers& out);
  template <class Key>
  void CopyAsideOf(const std::vector<const AsideRow*>& rows, const Buffers& out) const;
  void NoteBorn(const std::vector<uint64_t>& keys);

  ShardedTable* const table_;
  const std::shared_ptr<Moment> moment_;
  const std::shared_ptr<const std::vector<std::unique_ptr<ShardMoment>>> hold_shards_;
  const std::vector<std::unique_ptr<ShardMoment>>& shards_;
  const uint64_t version_;

  mutable std::mutex mutex_;
  int64_t left_ = 0;       // at least the rows to come
  int64_t in_flight_ = 0;  // calls that have picked rows and not yet copied them
  size_t shard_ = 0;
  uint32_t row_ = 0;
  std::deque<std::shared_ptr<const AsideBlock>> blocks_;
  int64_t block_row_ = 0;  // of the first block
  int64_t born_ = 0;
  std::vector<uint64_t> removed_;  // keys, sorted
  std::vector<bool> is_back_;      // for each of them: whether its key is there again
  int64_t back_ = 0;
};

}  // namespace kvtable
