// What concerns a table as a whole: how it is made, its size, its room.
#include "table/sharded_table.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "eviction/bounded_table.h"
#include "threads/run_tasks.h"

namespace kvtable {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;

int64_t DefaultShards(int64_t parts_beside) {
  cpu_set_t cpus;
  const int count = ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  const int64_t of_variable = std::max<int64_t>(8, int64_t{4} * count);
  const int64_t parts = std::clamp<int64_t>(parts_beside, 1, of_variable);  // whatever a graph says
  int64_t shards = 2;
  while (shards * parts < of_variable && shards < kMaxShards) shards *= 2;
  return shards;
}

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

ShardedTable::ShardedTable(const TableOptions& options)
    : key_type_(options.key_type),
      value_type_(options.value_type),
      dim_(options.dim),
      value_bytes_(options.dim * SizeOf(options.value_type)),
      huge_pages_(options.huge_pages),
      padding_key_(options.padding_key),
      layout_(std::make_shared<RowLayout>(options.value_type, options.dim, options.slots)),
      initial_(
          std::make_shared<InitialValue>(options.initializer, options.value_type, options.dim, padding_key_)),
      ages_(options.expiry) {
  int64_t shards = options.shards == 0 ? DefaultShards(options.parts_beside) : options.shards;
  // Fewer where each would have memory for but a few rows.
  const int64_t well = 16 * RowCache::kLeastRows * RowCache::BytesInMemory(layout_->row_bytes);
  while (options.shards == 0 && options.max_memory > 0 && shards > 1 && options.max_memory / shards < well) {
    shards /= 2;
  }
  while ((1 << shard_bits_) < shards) ++shard_bits_;
  index_slots_ = std::make_shared<EqualSlots>(1 << shard_bits_, huge_pages_, "a table's index");
  row_pages_ = MakeRowPages();
  if (options.max_memory > 0) {
    spill_ = std::make_shared<SpillFile>(options.spill, options.name, options.max_memory, shards);
  }
  for (int i = 0; i < shards; ++i) {
    std::unique_ptr<RowCache> cache;
    if (spill_ != nullptr) {
      cache = std::make_unique<RowCache>(spill_, layout_->row_bytes, options.max_memory / shards,
                                         options.huge_pages);
    }
    shards_.push_back(std::make_unique<Shard>(&seats_, i, layout_, options.huge_pages, index_slots_,
                                              row_pages_, std::move(cache)));
  }
  if (options.capacity_hint > 0) Reserve(options.capacity_hint, Serial());
}

std::shared_ptr<SharedPages> ShardedTable::MakeRowPages() const {
  return std::make_shared<SharedPages>(1 << shard_bits_, huge_pages_, "a table's rows");
}

MemoryUse ShardedTable::Memory() const {
  MemoryUse use;
  std::shared_ptr<SharedPages> row_pages;
  {
    std::lock_guard<std::mutex> hold(state_mutex_);
    row_pages = row_pages_;
  }
  use.slack_bytes = static_cast<int64_t>(row_pages->idle_bytes() + index_slots_->idle_bytes());
  for (const auto& shard : shards_) {
    std::shared_lock<ShardLock> hold(shard->lock);
    const int64_t rows = shard->rows.live_rows();
    use.rows += rows;
    use.row_bytes += (rows - shard->rows.spilled_rows()) * shard->rows.row_bytes();
    use.index_bytes += static_cast<int64_t>(shard->index.bytes());
    use.column_bytes += shard->rows.TouchedColumnBytes() + shard->zeroed.bytes();
    if (shard->watch != nullptr && shard->watch->log != nullptr)
      use.column_bytes += shard->watch->log->bytes();
    const int64_t spilled = shard->rows.spilled_rows();
    use.spilled_rows += spilled;
    use.slack_bytes += shard->rows.TouchedRowBytes() - (rows - spilled) * shard->rows.row_bytes();
  }
  if (spill_ != nullptr) {
    use.file_bytes = spill_->bytes();
    use.rows_read = spill_->rows_read.load(std::memory_order_relaxed);
    use.rows_written = spill_->rows_written.load(std::memory_order_relaxed);
  }
  std::lock_guard<std::mutex> hold(changes_mutex_);
  use.column_bytes += log_.bytes();
  return use;
}

int ShardedTable::MaxProbeLength() const {
  int longest = 0;
  for (const auto& shard : shards_) {
    std::shared_lock<ShardLock> hold(shard->lock);
    longest = std::max(longest, shard->index.MaxProbeLength());
  }
  return longest;
}

int64_t ShardedTable::ZeroedRows() const {
  int64_t rows = 0;
  for (const auto& shard : shards_) {
    std::shared_lock<ShardLock> hold(shard->lock);
    rows += shard->zeroed.count();
  }
  return rows;
}

int64_t ShardedTable::LockWaits() const {
  int64_t waits = 0;
  for (const auto& shard : shards_) waits += shard->lock.waits();
  return waits;
}

void ShardedTable::Clear() {
  const MomentGate::Alone alone(&gate_);
  std::lock_guard<std::mutex> hold_log(changes_mutex_);
  std::vector<std::shared_ptr<ShardChanges>> logs = EmptyLogs();
  for (size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = *shards_[s];
    std::lock_guard<ShardLock> hold(shard.lock);
    shard.Clear();
    StartLogAnew(&shard, std::move(logs[s]));
  }
  ForgetAllChanges(ChangeLog::Why::kCleared);
}

void ShardedTable::Reserve(int64_t rows, ParallelFor& threads) {
  if (rows < 0) ThrowInvalid("Reserve of " + std::to_string(rows) + " rows; expected 0 or more.");
  // Keys fall on shards like balls in bins: room for four standard deviations more than the mean.
  const double mean = static_cast<double>(rows) / static_cast<double>(shards_.size());
  const double each = shards_.size() == 1 ? mean : mean + 4 * std::sqrt(mean);
  RunTasks(threads, static_cast<int64_t>(shards_.size()), [&](int64_t s) {
    Shard& shard = *shards_[static_cast<size_t>(s)];
    std::lock_guard<ShardLock> hold(shard.lock);
    shard.rows.Reserve(static_cast<size_t>(each));
    shard.index.Reserve(static_cast<size_t>(each));
  });
}

std::unique_ptr<Table> Table::Create(const TableOptions& options) {
  if (options.dim <= 0 || options.dim > kMaxDim) {
    ThrowInvalid("A table of dim " + std::to_string(options.dim) + "; expected 1 to " +
                 std::to_string(kMaxDim) + ".");
  }
  if (options.shards < 0 || options.shards > kMaxShards || (options.shards & (options.shards - 1)) != 0) {
    ThrowInvalid("A table of " + std::to_string(options.shards) +
                 " shards; expected a power of two up to 64, or 0 for the default.");
  }
  if (options.capacity_hint < 0) {
    ThrowInvalid("A capacity hint of " + std::to_string(options.capacity_hint) + "; expected 0 or more.");
  }
  if (options.max_capacity < 0) {
    ThrowInvalid("A max_capacity of " + std::to_string(options.max_capacity) +
                 "; expected 1 or more rows, or 0 for no bound.");
  }
  if (options.max_memory < 0) {
    ThrowInvalid("A max_memory of " + std::to_string(options.max_memory) +
                 "; expected 1 or more bytes, or 0 for no bound.");
  }
  if ((options.max_memory > 0) != !options.spill.empty()) {
    ThrowInvalid(
        options.spill.empty()
            ? "A max_memory of " + std::to_string(options.max_memory) +
                  " bytes, and no folder for the rows that they have no room for. Name one on a local disk "
                  "in spill=."
            : "A spill folder '" + options.spill +
                  "', and nothing says how many rows stay in memory. Give max_memory=, in bytes.");
  }
  auto table = std::make_unique<ShardedTable>(options);
  if (options.max_capacity == 0) return table;
  return BoundTable(std::move(table), options.max_capacity, options.eviction, options.clock);
}

}  // namespace kvtable
