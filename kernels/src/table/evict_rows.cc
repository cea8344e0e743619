// Rows that go by age, norm, frequency or rank: passes over the rows in the order in which they lie.
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "base/hash.h"
#include "eviction/row_test.h"
#include "memory/prefetch.h"
#include "table/sharded_table.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr uint32_t kRowsPerLock = 1024;
constexpr uint32_t kErasesAhead = 16;  // buckets asked for before the one that loses a key

// The rows of a slice that are in the file, read at once.
class SpilledSlice {
 public:
  // The rows [begin, end) of a store, whose shard is locked until the last call of Row.
  void Read(const RowStore& rows, uint32_t begin, uint32_t end) {
    rows_.clear();
    reads_.Clear();
    if (rows.cache() == nullptr) return;
    rows.ForEachLive(begin, std::min(end, rows.high_water()), [&](uint32_t row) {
      if (rows.cache()->IsHere(row)) return true;
      rows_.push_back(row);
      reads_.Add(*rows.cache(), row);
      return true;
    });
    reads_.Run();
  }
  // The bytes of one of them.
  const char* Row(const RowStore& rows, uint32_t row) const {
    if (rows.cache() == nullptr || rows.cache()->IsHere(row)) return rows.Row(row);
    return reads_.Row(static_cast<size_t>(std::lower_bound(rows_.begin(), rows_.end(), row) - rows_.begin()));
  }

 private:
  std::vector<uint32_t> rows_;  // ascending
  FileReads reads_;
};

// Calls visit(squares_of) with a function from a row's value to the sum of its squares.
template <class Visit>
void VisitSquares(bool reads_values, ValueType type, int64_t dim, const Visit& visit) {
  if (!reads_values) return visit([](const char*) { return 0.0; });
  VisitAnyValueType(type, [&](auto t) {
    visit([dim](const char* value) { return SumOfSquares<decltype(t)>(value, dim); });
  });
}

// Calls body(shard, begin, end) for the row numbers of a slice, kRowsPerLock at a time. A cursor is at
// shard << 32 | row.
template <class HighWater, class Body>
void ForSlice(int shards, PassCursor* cursor, int64_t most_rows, const HighWater& high_water,
              const Body& body) {
  while (most_rows > 0 && !cursor->ended) {
    const int shard = static_cast<int>(cursor->next >> 32);
    const uint32_t begin = static_cast<uint32_t>(cursor->next);
    const uint32_t rows = high_water(shard);
    if (begin < rows) {
      const int64_t length = std::min<int64_t>({most_rows, kRowsPerLock, rows - begin});
      body(shard, begin, begin + static_cast<uint32_t>(length));
      most_rows -= length;
      cursor->next += static_cast<uint64_t>(length);
    } else {
      cursor->next = static_cast<uint64_t>(shard + 1) << 32;
      cursor->ended = shard + 1 >= shards;
    }
  }
}

}  // namespace

int64_t ShardedTable::PassLength() const {
  int64_t rows = 0;
  for (const auto& shard : shards_) {
    std::shared_lock<ShardLock> hold(shard->lock);
    rows += shard->rows.high_water();
  }
  return rows;
}

int64_t ShardedTable::EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                                 ParallelFor& threads) {
  const int shards = static_cast<int>(shards_.size());
  const auto high_water = [&](int s) {
    const Shard& shard = *shards_[static_cast<size_t>(s)];
    std::shared_lock<ShardLock> hold(shard.lock);
    return shard.rows.high_water();
  };
  AwaitOwnRoomAside();
  std::atomic<int64_t> evicted{0};
  const auto evict = [&](int s, uint32_t begin, uint32_t end) {
    evicted.fetch_add(EvictRows(test, s, begin, end), std::memory_order_relaxed);
  };
  if (most_rows < kAllRows || cursor->next != 0) {
    ForSlice(shards, cursor, most_rows, high_water, evict);
  } else {
    RunTasks(threads, shards, [&](int64_t s) {
      PassCursor own{static_cast<uint64_t>(s) << 32, false};
      ForSlice(static_cast<int>(s) + 1, &own, kAllRows, high_water, evict);
    });
    cursor->ended = true;
  }
  expired_.fetch_add(evicted.load(), std::memory_order_relaxed);
  return evicted.load();
}

// Looks under the shared lock, beside lookups, and takes the other for rows that go, if there are any: each is
// looked at again there, since it may have been written, or removed, in between.
int64_t ShardedTable::EvictRows(const RowTest& test, int shard_number, uint32_t begin, uint32_t end) {
  Shard& shard = *shards_[static_cast<size_t>(shard_number)];
  std::array<uint32_t, kRowsPerLock> found;
  uint32_t count = 0;
  int64_t evicted = 0;
  VisitSquares(test.reads_values(), value_type_, dim_, [&](const auto& squares_of) {
    SpilledSlice spilled;
    const auto goes = [&](uint32_t row) {
      const RowStamp& stamp = *shard.rows.StampOf(row);
      return Goes(test, stamp.key, stamp.frequency, stamp.version,
                  [&] { return squares_of(spilled.Row(shard.rows, row)); });
    };
    {
      std::shared_lock<ShardLock> hold(shard.lock);
      if (test.reads_values()) spilled.Read(shard.rows, begin, end);
      shard.rows.ForEachLive(begin, std::min(end, shard.rows.high_water()), [&](uint32_t row) {
        if (goes(row)) found[count++] = row;
        return true;
      });
    }
    if (count == 0) return;
    std::lock_guard<ShardLock> hold(shard.lock);
    if (test.reads_values()) spilled.Read(shard.rows, found[0], found[count - 1] + 1);
    shard.rows.PrepareFree(count);
    const uint32_t rows = shard.rows.high_water();
    const auto hash_of = [&](uint32_t i) { return Mix64(shard.rows.StampOf(found[i])->key); };
    for (uint32_t i = 0; i < count; ++i) {
      if (i + kErasesAhead < count && found[i + kErasesAhead] < rows) {
        PrefetchToWrite(shard.index.Home(hash_of(i + kErasesAhead)).bucket());
        shard.index.PrefetchErase(hash_of(i + kErasesAhead / 2));
      }
      const uint32_t row = found[i];
      if (row >= rows || !shard.rows.IsLive(row) || !goes(row)) continue;
      shard.Remove(hash_of(i));
      if (on_evicted_) on_evicted_(static_cast<uint64_t>(shard_number) << 32 | row);
      ++evicted;
    }
  });
  return evicted;
}

void ShardedTable::CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, int64_t* counts,
                              ParallelFor& threads) const {
  const int shards = static_cast<int>(shards_.size());
  VisitSquares(digit.by == RankBy::kNorm, value_type_, dim_, [&](const auto& squares_of) {
    const auto count_rows = [&](int s, uint32_t begin, uint32_t end, auto* to) {
      const Shard& shard = *shards_[static_cast<size_t>(s)];
      std::shared_lock<ShardLock> hold(shard.lock);
      SpilledSlice spilled;
      if (digit.by == RankBy::kNorm) spilled.Read(shard.rows, begin, end);
      shard.rows.ForEachLive(begin, std::min(end, shard.rows.high_water()), [&](uint32_t row) {
        const RowStamp& stamp = *shard.rows.StampOf(row);
        const int value = DigitOf(digit, RankOf(digit.by, stamp.key, stamp.frequency, stamp.version,
                                                [&] { return squares_of(spilled.Row(shard.rows, row)); }));
        if (value >= 0) ++to[value];
        return true;
      });
    };
    const auto high_water = [&](int s) {
      const Shard& shard = *shards_[static_cast<size_t>(s)];
      std::shared_lock<ShardLock> hold(shard.lock);
      return shard.rows.high_water();
    };
    if (most_rows < kAllRows || cursor->next != 0) {
      ForSlice(shards, cursor, most_rows, high_water,
               [&](int s, uint32_t begin, uint32_t end) { count_rows(s, begin, end, counts); });
      return;
    }
    std::mutex adding;
    RunTasks(threads, shards, [&](int64_t s) {
      PassCursor own{static_cast<uint64_t>(s) << 32, false};
      std::vector<uint32_t> of_shard(RankDigit::kValues);
      ForSlice(static_cast<int>(s) + 1, &own, kAllRows, high_water,
               [&](int of, uint32_t begin, uint32_t end) { count_rows(of, begin, end, of_shard.data()); });
      std::lock_guard<std::mutex> hold(adding);
      for (size_t v = 0; v < of_shard.size(); ++v) counts[v] += of_shard[v];
    });
    cursor->ended = true;
  });
}

// Through the list of free rows, so that all who watch rows go and come see it go and come.
uint32_t ShardedTable::Renew(int shard_number, uint64_t key, uint32_t row) {
  Shard& shard = *shards_[static_cast<size_t>(shard_number)];
  shard.rows.PrepareFree(1);
  shard.Remove(Mix64(key));
  if (on_evicted_) on_evicted_(static_cast<uint64_t>(shard_number) << 32 | row);
  expired_.fetch_add(1, std::memory_order_relaxed);
  bool is_new = false;
  return shard.FindOrInsert(key, Mix64(key), &is_new);
}

}  // namespace kvtable
