// What changed in a table, and exports of one moment.
#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory/scratch.h"
#include "table/moment_exporter.h"
#include "table/sharded_table.h"

namespace kvtable {
namespace {

[[noreturn]] void ThrowFailed(const std::string& message) {
  throw Error(ErrorCode::kFailedPrecondition, message);
}

// The exclusive locks of all shards.
class AllLocks {
 public:
  explicit AllLocks(const std::vector<std::unique_ptr<Shard>>& shards) : shards_(shards) {
    for (const auto& shard : shards_) shard->lock.lock();
  }
  ~AllLocks() {
    for (const auto& shard : shards_) shard->lock.unlock();
  }
  AllLocks(const AllLocks&) = delete;
  AllLocks& operator=(const AllLocks&) = delete;

 private:
  const std::vector<std::unique_ptr<Shard>>& shards_;
};

}  // namespace

// ---- The change log

uint64_t ShardedTable::TrackChanges(int64_t max_removed) {
  if (max_removed < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "A max_removed of " + std::to_string(max_removed) + "; expected 0 or more keys.");
  }
  std::lock_guard<std::mutex> hold_log(changes_mutex_);
  if (log_.on()) return log_.newest();
  ChangeLog log;
  log.Begin(max_removed);
  std::vector<std::shared_ptr<ShardChanges>> logs;
  std::vector<std::unique_ptr<RowWatch>> watches;
  for (size_t s = 0; s < shards_.size(); ++s) {
    logs.push_back(std::make_shared<ShardChanges>());
    logs.back()->room = log.room();
    watches.push_back(std::make_unique<RowWatch>());
  }
  for (size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = *shards_[s];
    std::lock_guard<ShardLock> hold(shard.lock);
    if (shard.watch == nullptr) shard.watch = std::move(watches[s]);
    shard.watch->log = std::move(logs[s]);
  }
  log_ = std::move(log);
  watched_.store(true, std::memory_order_relaxed);
  return log_.newest();
}

bool ShardedTable::tracks_changes() const {
  std::lock_guard<std::mutex> hold(changes_mutex_);
  return log_.on();
}

uint64_t ShardedTable::CutChanges() {
  const auto batches = HoldBatches(true);
  std::lock_guard<std::mutex> hold(changes_mutex_);
  return Cut(true, {}, std::nullopt);
}

std::string ShardedTable::ChangesLost(uint64_t since) const {
  std::lock_guard<std::mutex> hold_log(changes_mutex_);
  const std::string lost = log_.Lost(since);
  if (!lost.empty()) return lost;
  for (const auto& shard : shards_) {
    std::shared_lock<ShardLock> hold(shard->lock);
    if (shard->watch->log->lost) return log_.LostByRoom(since);
  }
  return "";
}

void ShardedTable::ForgetChanges(uint64_t upto) {
  std::lock_guard<std::mutex> hold(changes_mutex_);
  log_.Forget(upto);
}

std::vector<std::shared_ptr<ShardChanges>> ShardedTable::EmptyLogs() const {
  std::vector<std::shared_ptr<ShardChanges>> logs(shards_.size());
  if (!log_.on()) return logs;
  for (std::shared_ptr<ShardChanges>& log : logs) {
    log = std::make_shared<ShardChanges>();
    log->room = log_.room();
  }
  return logs;
}

void ShardedTable::StartLogAnew(Shard* shard, std::shared_ptr<ShardChanges> empty) noexcept {
  if (empty == nullptr) return;
  ChangeLog::GiveBack(*shard->watch->log);
  shard->watch->log = std::move(empty);
}

void ShardedTable::ForgetAllChanges(ChangeLog::Why why) noexcept {
  if (log_.on()) log_.Reset(why);
}

// ---- Moments

uint64_t ShardedTable::Cut(bool cut, const std::vector<std::unique_ptr<ShardMoment>>& moments,
                           std::optional<uint64_t> since) {
  if (cut && !log_.on()) ThrowFailed("The table has no versions to cut: its changes are not tracked.");
  if (since) {
    const std::string lost = log_.Lost(*since);
    if (!lost.empty()) ThrowFailed(lost);
  }
  // All that may fail comes first.
  std::vector<std::shared_ptr<ShardChanges>> fresh;
  Version ended(shards_.size());
  if (cut) fresh = EmptyLogs();
  for (size_t s = 0; s < moments.size(); ++s) {
    if (!since) continue;
    std::vector<std::shared_ptr<const ShardChanges>> changes = log_.Since(*since, s);
    changes.reserve(changes.size() + 1);
    moments[s]->SetChanges(std::move(changes));
  }
  log_.PrepareClose();
  for (;;) {
    // Room for the bits of rows that come by the time that all locks are there.
    for (size_t s = 0; s < moments.size(); ++s) {
      Shard& shard = *shards_[s];
      auto watch = std::make_unique<RowWatch>();
      uint32_t rows;
      {
        std::lock_guard<ShardLock> hold(shard.lock);
        if (shard.watch == nullptr) shard.watch = std::move(watch);
        std::vector<ShardMoment*>& all = shard.watch->moments;
        if (all.capacity() == all.size()) all.reserve(all.size() + 4);
        rows = shard.rows.high_water();
      }
      moments[s]->Prepare(rows + rows / 8 + 4096);
    }
    const AllLocks hold(shards_);
    bool is_ready = true;
    for (size_t s = 0; s < moments.size(); ++s) {
      const Shard& shard = *shards_[s];
      is_ready = is_ready && shard.watch != nullptr &&
                 shard.watch->moments.capacity() > shard.watch->moments.size() &&
                 moments[s]->prepared() >= shard.rows.high_water();
      if (since && shard.watch->log->lost) ThrowFailed(log_.LostByRoom(*since));
    }
    if (!is_ready) continue;
    for (size_t s = 0; s < shards_.size(); ++s) {
      Shard& shard = *shards_[s];
      if (!moments.empty()) {
        ShardMoment& moment = *moments[s];
        if (since) moment.AddChanges(shard.watch->log);
        moment.Begin(shard.rows.high_water());
        shard.watch->moments.push_back(&moment);
      }
      if (cut) {
        ended[s] = shard.watch->log;
        shard.watch->log = std::move(fresh[s]);
      }
    }
    break;
  }
  return cut ? log_.Close(std::move(ended)) : 0;
}

void ShardedTable::Unwatch(const std::vector<std::unique_ptr<ShardMoment>>& moments) noexcept {
  for (size_t s = 0; s < moments.size(); ++s) {
    Shard& shard = *shards_[s];
    std::lock_guard<ShardLock> hold(shard.lock);
    if (shard.watch == nullptr) continue;
    std::vector<ShardMoment*>& all = shard.watch->moments;
    all.erase(std::remove(all.begin(), all.end(), moments[s].get()), all.end());
    if (shard.watch->idle()) shard.watch.reset();
  }
}

std::unique_ptr<Exporter> ShardedTable::ExportMoment(const MomentOptions& options) {
  auto moment = std::make_shared<Moment>();
  moment->memory = options.aside != nullptr ? options.aside : std::make_shared<AsideMemory>();
  moment->rank_of = ranks_.rank_of;
  moment->memory->NoteProgress();
  const auto moments = std::make_shared<std::vector<std::unique_ptr<ShardMoment>>>();
  for (size_t s = 0; s < shards_.size(); ++s) {
    moments->push_back(std::make_unique<ShardMoment>(moment, static_cast<int>(s)));
  }
  gate_.Enter(moment);
  try {
    uint64_t version;
    {
      const auto batches = HoldBatches(true);
      std::lock_guard<std::mutex> hold(changes_mutex_);
      watched_.store(true, std::memory_order_relaxed);  // from here on, for it costs little
      version = Cut(options.cut || options.since.has_value(), *moments, options.since);
    }
    return std::make_unique<MomentExporter>(this, moment, moments, version);
  } catch (...) {
    Unwatch(*moments);
    gate_.Leave(moment.get());
    throw;
  }
}

void ShardedTable::CheckNotGivenUp(const Moment& moment) {
  if (!moment.given_up.load()) return;
  ThrowFailed(
      "The export of one moment was given up: for a minute nobody took its rows while others waited to "
      "change them, or an earlier read of it failed. Save again. If that fails, too, every thread that "
      "could have taken them was waiting: have more of them (in TensorFlow, inter_op_parallelism_threads "
      "of the session, or of its server).");
}

void ShardedTable::BeforeScores(const uint64_t* positions, int64_t n) {
  if (!watched_.load(std::memory_order_relaxed)) return;
  // By shard, a lock for each.
  std::array<int64_t, kMaxShards + 1> begin{};
  for (int64_t i = 0; i < n; ++i) {
    if (positions[i] != kNoPosition) ++begin[(positions[i] >> 32) + 1];
  }
  for (size_t s = 1; s < begin.size(); ++s) begin[s] += begin[s - 1];
  Scratch<uint32_t> rows(static_cast<size_t>(begin[kMaxShards]) + 1);
  std::array<int64_t, kMaxShards + 1> next = begin;
  for (int64_t i = 0; i < n; ++i) {
    if (positions[i] == kNoPosition) continue;
    rows[static_cast<size_t>(next[positions[i] >> 32]++)] = static_cast<uint32_t>(positions[i]);
  }
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (begin[s] == begin[s + 1]) continue;
    Shard& shard = *shards_[s];
    std::lock_guard<ShardLock> hold(shard.lock);
    if (shard.watch == nullptr) continue;
    for (int64_t i = begin[s]; i < begin[s + 1]; ++i) {
      const uint32_t row = rows[static_cast<size_t>(i)];
      if (row < shard.rows.high_water() && shard.rows.IsLive(row)) {
        shard.watch->BeforeWrite(shard.rows, row, false);
      }
    }
  }
}

}  // namespace kvtable
