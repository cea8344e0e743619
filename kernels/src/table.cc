// The table: shards, batches over them, and who may do what when.
//
// Concurrency
//
// A key belongs to one shard, by the high bits of its hash. A shard's index, rows, stamps and layout are
// guarded by the shard's readers-writer lock, and by nothing else:
//   - who holds it shared may read them; rows don't change under him, so every row he sees is whole;
//   - who holds it exclusively may change them, and leaves every row whole before he lets go, also by an
//   exception:
//     whatever may fail (memory) happens before the first change of a row.
// Locks and their order:
//   1. `schema_mutex_`: one EnsureSlots at a time, for the whole of it. Taken before any other, by
//   EnsureSlots only.
//   2. Shard locks. A lookup takes the shared locks of all shards that a block of its keys touches, in
//   ascending order;
//      a writer holds one exclusive lock and no other shard's. Since a writer never waits with a lock in hand
//      and readers wait in ascending order only, nobody waits in a circle, although a waiting writer holds up
//      readers.
//   3. `state_mutex_`: guards the pointers to the current layout and initializer. A leaf: nothing is taken
//   under it.
// Nobody calls ParallelFor::Run with a shard lock in hand: the lent threads may be busy waiting for that very
// lock.
//
// A lookup locks a block of some thousand keys at a time, a write one shard's share of its batch. So a batch
// is not one transaction: another thread's write may come between two blocks. Each row is.
//
// A row's number stays the same for life, and its address until EnsureSlots gives its shard another layout.
// Nothing outside a lock remembers the address. A number may be remembered (RowsOut::positions), and proves
// nothing: after a removal the row may be free or another key's.
#include "kvtable/table.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "admission.h"
#include "always_inline.h"
#include "bounded_table.h"
#include "check_batch.h"
#include "copy_rows.h"
#include "distinct_keys.h"
#include "elements.h"
#include "hash.h"
#include "initial_value.h"
#include "row_layout.h"
#include "row_updater.h"
#include "run_tasks.h"
#include "scratch.h"
#include "shard.h"
#include "shard_groups.h"

namespace kvtable {
namespace {

constexpr int64_t kBlock = 2048;    // keys of a lookup under one set of locks
constexpr int64_t kAhead = 16;      // searches begun before the one being finished; buckets twice as far
constexpr int64_t kRowsAhead = 32;  // rows of a lookup asked for before the one being copied
constexpr int64_t kLeastKeysPerTask = 2048;  // of a lookup
constexpr int64_t kMaxDim = int64_t{1} << 24;

uint32_t SaturatingAdd(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

void StampRow(RowStamp* row, Stamp stamp) {
  row->frequency = SaturatingAdd(row->frequency, stamp.frequency);
  row->version = stamp.version;
}

int DefaultShards() {
  cpu_set_t cpus;
  const int count = ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  int shards = 8;
  while (shards < 4 * count && shards < kMaxShards) shards *= 2;
  return shards;
}

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

class TableImpl;

class ExporterImpl : public Exporter {
 public:
  explicit ExporterImpl(const TableImpl* table);
  int64_t max_rows() const override;
  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override;

 private:
  template <class Key>
  int64_t Write(const uint64_t* picks, int64_t count, int64_t at, const Buffers& out) const;

  const TableImpl* table_;
  std::vector<uint32_t> ends_;  // of each shard: row numbers handed out when the export began
  int shard_ = 0;
  uint32_t row_ = 0;
};

class TableImpl : public Table {
 public:
  explicit TableImpl(const TableOptions& options)
      : key_type_(options.key_type),
        value_type_(options.value_type),
        dim_(options.dim),
        value_bytes_(options.dim * SizeOf(options.value_type)),
        layout_(std::make_shared<RowLayout>(options.value_type, options.dim, options.slots)),
        initial_(std::make_shared<InitialValue>(options.initializer, options.value_type, options.dim)) {
    const int shards = options.shards == 0 ? DefaultShards() : options.shards;
    while ((1 << shard_bits_) < shards) ++shard_bits_;
    for (int i = 0; i < shards; ++i) shards_.push_back(std::make_unique<Shard>(layout_, options.huge_pages));
    if (options.capacity_hint > 0) Reserve(options.capacity_hint, Serial());
  }

  KeyType key_type() const override { return key_type_; }
  ValueType value_type() const override { return value_type_; }
  int64_t dim() const override { return dim_; }
  Initializer initializer() const override { return initial()->initializer(); }
  RowSchema schema() const override {
    const std::shared_ptr<const RowLayout> now = layout();
    return {now->slots, now->generation};
  }
  uint64_t generation() const override { return generation_.load(std::memory_order_acquire); }

  int64_t Size() const override {
    int64_t size = 0;
    for (const auto& shard : shards_) size += shard->size.load(std::memory_order_relaxed);
    return size;
  }

  MemoryUse Memory() const override {
    MemoryUse use;
    for (const auto& shard : shards_) {
      std::shared_lock<RwSpinlock> hold(shard->lock);
      const int64_t rows = shard->rows.live_rows();
      const int64_t row_bytes = rows * shard->rows.row_bytes();
      use.rows += rows;
      use.row_bytes += row_bytes;
      use.index_bytes += static_cast<int64_t>(shard->index.bytes());
      use.column_bytes += shard->rows.TouchedColumnBytes() + shard->zeroed.bytes();
      use.slack_bytes += shard->rows.TouchedRowBytes() - row_bytes;
    }
    return use;
  }

  int MaxProbeLength() const override {
    int longest = 0;
    for (const auto& shard : shards_) {
      std::shared_lock<RwSpinlock> hold(shard->lock);
      longest = std::max(longest, shard->index.MaxProbeLength());
    }
    return longest;
  }

  void Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
              int64_t num_defaults, bool* found, ParallelFor& threads) const override {
    CheckBatch(n);
    if (missing == Missing::kDefault && n > 0 && (defaults == nullptr || num_defaults <= 0)) {
      ThrowInvalid("Gather with Missing::kDefault got " + std::to_string(num_defaults) +
                   " default rows; expected at least one.");
    }
    const std::shared_ptr<const InitialValue> init = initial();
    const char* const default_rows = static_cast<const char*>(defaults);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(keys);
      const auto on_missing = [&](int64_t i) {
        char* const to = out.rows + out.PlaceOf(i) * value_bytes_;
        switch (missing) {
          case Missing::kZeros:
            std::memset(to, 0, static_cast<size_t>(value_bytes_));
            break;
          case Missing::kInitial:
            init->Fill(WidenKey(typed[i]), to);
            break;
          case Missing::kDefault:
            std::memcpy(to, default_rows + i % num_defaults * value_bytes_,
                        static_cast<size_t>(value_bytes_));
            break;
        }
      };
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(),
               [&](int64_t r) { ReadValues(typed, ranges.begin(r), ranges.end(r), out, found, on_missing); });
    });
  }

  void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                      ParallelFor& threads) override {
    CheckBatch(n);
    if (!(insertion.admission >= 0.0 && insertion.admission <= 1.0)) {
      ThrowInvalid("An admission probability of " + std::to_string(insertion.admission) +
                   "; expected 0.0 to 1.0.");
    }
    const bool admits_all = insertion.admission == 1.0;
    const std::shared_ptr<const InitialValue> init = initial();
    if (insertion.inserted != nullptr) std::memset(insertion.inserted, 0, static_cast<size_t>(n));
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(keys);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      Scratch<uint32_t> misses(static_cast<size_t>(n));
      Scratch<int64_t> miss_counts(static_cast<size_t>(ranges.count()));
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        uint32_t* const missed = misses.data() + ranges.begin(r);
        int64_t count = 0;
        const int64_t end = ranges.end(r);
        for (int64_t begin = ranges.begin(r); begin < end;) {
          const int64_t before = count;
          const int64_t block_end = std::min(begin + kBlock, end);
          ReadValues(typed, begin, block_end, out, nullptr,
                     [&](int64_t i) { missed[count++] = static_cast<uint32_t>(i); });
          const bool mostly_new = admits_all && 2 * (count - before) > block_end - begin;
          begin = block_end;
          if (!mostly_new) continue;
          // The rest will hardly fare better: the insert finds what is there just as well.
          for (; begin < end; ++begin) missed[count++] = static_cast<uint32_t>(begin);
        }
        miss_counts[static_cast<size_t>(r)] = count;
      });
      int64_t total = miss_counts[0];
      for (int64_t r = 1; r < ranges.count(); ++r) {
        const int64_t count = miss_counts[static_cast<size_t>(r)];
        std::memmove(misses.data() + total, misses.data() + ranges.begin(r), static_cast<size_t>(count) * 4);
        total += count;
      }
      if (!admits_all) total = KeepAdmitted(typed, misses.data(), total, out, insertion);
      if (total == 0) return;
      const ShardGroups groups(typed, misses.data(), total, shard_bits_, threads);
      RunTasks(threads, groups.size(),
               [&](int64_t g) { InsertMissed(groups[g], *init, insertion.stamp, out, insertion.inserted); });
    });
  }

  void GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                     ParallelFor& threads) const override {
    CheckBatch(n);
    const std::shared_ptr<const InitialValue> init = initial();
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Key* const typed = static_cast<const Key*>(keys);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        std::vector<char> fresh;  // what a missing row would hold
        ReadRange(
            typed, ranges.begin(r), ranges.end(r),
            [&](const Shard& shard) {
              for (const ColumnOut& column : out) CheckColumn(shard, column);
            },
            [](int64_t, size_t, const Shard& shard, uint32_t row)
                KVTABLE_ALWAYS_INLINE -> const char* { return shard.rows.Row(row); },
            [](const Shard& shard, const char* row)
                KVTABLE_ALWAYS_INLINE { PrefetchRow<kAnyBytes>(row, shard.rows.row_bytes()); },
            [&](int64_t i, const Shard& shard, const char* row) {
              if (found != nullptr) found[i] = row != nullptr;
              if (row == nullptr) {
                fresh.resize(static_cast<size_t>(shard.layout->row_bytes));
                init->Fill(WidenKey(typed[i]), fresh.data());
                shard.layout->InitializeSlots(fresh.data());
                row = fresh.data();
              }
              for (const ColumnOut& column : out) {
                const RowLayout::Column& c = shard.layout->columns[static_cast<size_t>(column.column)];
                std::memcpy(static_cast<char*>(column.data) + i * c.bytes, row + c.offset,
                            static_cast<size_t>(c.bytes));
              }
            });
      });
    });
  }

  void Contains(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    CheckBatch(n);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        ReadRange(
            static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), [](const Shard&) {},
            [](int64_t, size_t, const Shard& shard, uint32_t) { return &shard; },
            [](const Shard&, const Shard*) {},
            [&](int64_t i, const Shard&, const Shard* there) { out[i] = there != nullptr; });
      });
    });
  }

  void GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                    ParallelFor& threads) const override {
    CheckBatch(n);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        ReadRange(
            static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), [](const Shard&) {},
            [](int64_t, size_t, const Shard& shard, uint32_t row)
                KVTABLE_ALWAYS_INLINE -> const RowStamp* { return shard.rows.StampOf(row); },
            [](const Shard&, const RowStamp* stamp) KVTABLE_ALWAYS_INLINE { __builtin_prefetch(stamp); },
            [&](int64_t i, const Shard&, const RowStamp* stamp) {
              if (freqs != nullptr) freqs[i] = stamp == nullptr ? 0 : stamp->frequency;
              if (versions != nullptr) versions[i] = stamp == nullptr ? 0 : stamp->version;
            });
      });
    });
  }

  void Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const override {
    CheckBatch(n);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        ReadRange(
            static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), [](const Shard&) {},
            [positions](int64_t i, size_t number, const Shard& shard, uint32_t row) KVTABLE_ALWAYS_INLINE {
              positions[i] = uint64_t{number} << 32 | row;
              return &shard;
            },
            [](const Shard&, const Shard*) {},
            [positions](int64_t i, const Shard&, const Shard* there) {
              if (there == nullptr) positions[i] = kNoPosition;
            });
      });
    });
  }

  void KeysAt(const uint64_t* positions, int64_t n, void* keys) const override {
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      for (int64_t i = 0; i < n; ++i) {
        const Shard& shard = *shards_[positions[i] >> 32];
        std::shared_lock<RwSpinlock> hold(shard.lock);
        static_cast<Key*>(keys)[i] =
            static_cast<Key>(shard.rows.StampOf(static_cast<uint32_t>(positions[i]))->key);
      }
    });
  }

  void Upsert(const void* keys, int64_t n, const void* values, Stamp stamp, ParallelFor& threads) override {
    const char* const rows_in = static_cast<const char*>(values);
    const int64_t bytes = value_bytes_;
    VisitRowBytes(bytes, [&](auto known) {
      constexpr int64_t kBytes = decltype(known)::value;
      WriteBatch(
          keys, n, threads, [](const Shard&) {},
          [=](int64_t i) KVTABLE_ALWAYS_INLINE { PrefetchRow<kBytes>(rows_in + i * bytes, bytes); },
          [=](Shard& shard, uint32_t row, uint64_t, int64_t i, bool is_new) {
            char* const at = shard.rows.Row(row);
            CopyRow<kBytes>(at, rows_in + i * bytes, bytes);
            if (is_new) shard.layout->InitializeSlots(at);
            StampRow(shard.rows.StampOf(row), stamp);
          });
    });
  }

  void UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                     ParallelFor& threads) override {
    WriteColumns(
        keys, n, in, threads, [](const Shard&, int64_t) {},
        [stamp](Shard& shard, uint32_t row, int64_t) { StampRow(shard.rows.StampOf(row), stamp); });
  }

  void Accumulate(const void* keys, int64_t n, const void* deltas, bool from_zeros, Stamp stamp,
                  ParallelFor& threads) override {
    const std::shared_ptr<const InitialValue> init = initial();
    const int64_t bytes = value_bytes_;
    VisitAnyValueType(value_type_, [&](auto t) {
      using T = decltype(t);
      const T* const rows_in = static_cast<const T*>(deltas);
      const int64_t width = dim_;
      WriteBatch(
          keys, n, threads, [](const Shard&) {},
          [=](int64_t i) {
            PrefetchRow<kAnyBytes>(reinterpret_cast<const char*>(rows_in + i * width), bytes);
          },
          [=, &init](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
            char* const at = shard.rows.Row(row);
            if (is_new) {
              if (from_zeros) {
                std::memset(at, 0, static_cast<size_t>(bytes));
              } else {
                init->Fill(key, at);
              }
              shard.layout->InitializeSlots(at);
            }
            T* const value = reinterpret_cast<T*>(at);
            const T* const delta = rows_in + i * width;
            for (int64_t j = 0; j < width; ++j) {
              value[j] = AddElements<T>(value[j], delta[j]);
            }
            StampRow(shard.rows.StampOf(row), stamp);
          });
    });
  }

  ApplyCounts Apply(const void* keys, const uint64_t* positions, int64_t n, const void* gradients,
                    const Update& update, const SlotColumns& slots, Stamp stamp,
                    ParallelFor& threads) override {
    CheckBatch(n);
    if (slots.columns.size() != update.optimizer->slots.size()) {
      ThrowInvalid(std::string("Optimizer ") + update.optimizer->name + " keeps " +
                   std::to_string(update.optimizer->slots.size()) + " slots; got columns for " +
                   std::to_string(slots.columns.size()) + ".");
    }
    const RowUpdater updater(update, value_type_, dim_);
    const std::shared_ptr<const InitialValue> init = initial();
    std::atomic<int64_t> updated{0};
    std::atomic<int64_t> skipped{0};
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const ShardGroups groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads);
      RunTasks(threads, groups.size(), [&](int64_t g) {
        const ApplyCounts counts = ApplyGroup(groups[g], positions, static_cast<const char*>(gradients),
                                              update, updater, slots, stamp, *init);
        updated.fetch_add(counts.updated, std::memory_order_relaxed);
        skipped.fetch_add(counts.skipped, std::memory_order_relaxed);
      });
    });
    skipped_updates_.fetch_add(skipped.load(), std::memory_order_relaxed);
    return {updated.load(), skipped.load()};
  }

  void Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    CheckBatch(n);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const Ranges ranges(n, kLeastKeysPerTask, threads);
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        ReadRange(
            static_cast<const Key*>(keys), ranges.begin(r), ranges.end(r), [](const Shard&) {},
            [&](int64_t i, size_t, const Shard& shard, uint32_t row) {
              out[i] = shard.zeroed.Has(row);
              return &shard;
            },
            [](const Shard&, const Shard*) {},
            [&](int64_t i, const Shard&, const Shard* there) { out[i] = there != nullptr && out[i]; });
      });
    });
  }

  int64_t ZeroedRows() const override {
    int64_t rows = 0;
    for (const auto& shard : shards_) {
      std::shared_lock<RwSpinlock> hold(shard->lock);
      rows += shard->zeroed.count();
    }
    return rows;
  }

  int64_t SkippedUpdates() const override { return skipped_updates_.load(std::memory_order_relaxed); }

  int64_t Remove(const void* keys, int64_t n, ParallelFor& threads) override {
    CheckBatch(n);
    std::atomic<int64_t> removed{0};
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const ShardGroups groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads);
      RunTasks(threads, groups.size(), [&](int64_t g) {
        const ShardGroups::Group& group = groups[g];
        Shard& shard = *shards_[static_cast<size_t>(group.shard)];
        int64_t count = 0;
        std::lock_guard<RwSpinlock> hold(shard.lock);
        shard.rows.PrepareFree(static_cast<size_t>(std::min<int64_t>(group.count, shard.rows.live_rows())));
        for (int64_t i = 0; i < group.count; ++i) {
          if (i + kAhead < group.count)
            __builtin_prefetch(shard.index.Home(Mix64(group.keys[i + kAhead])), 1);
          count += shard.Remove(group.keys[i], Mix64(group.keys[i])) ? 1 : 0;
        }
        removed.fetch_add(count, std::memory_order_relaxed);
      });
    });
    return removed.load();
  }

  void Clear() override {
    for (const auto& shard : shards_) {
      std::lock_guard<RwSpinlock> hold(shard->lock);
      shard->Clear();
    }
  }

  void Reserve(int64_t rows, ParallelFor& threads) override {
    if (rows < 0) ThrowInvalid("Reserve of " + std::to_string(rows) + " rows; expected 0 or more.");
    // Keys fall on shards like balls in bins: room for four standard deviations more than the mean.
    const double mean = static_cast<double>(rows) / static_cast<double>(shards_.size());
    const double each = shards_.size() == 1 ? mean : mean + 4 * std::sqrt(mean);
    RunTasks(threads, static_cast<int64_t>(shards_.size()), [&](int64_t s) {
      Shard& shard = *shards_[static_cast<size_t>(s)];
      std::lock_guard<RwSpinlock> hold(shard.lock);
      shard.rows.Reserve(static_cast<size_t>(each));
      shard.index.Reserve(static_cast<size_t>(each));
    });
  }

  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) override {
    std::lock_guard<std::mutex> one_at_a_time(schema_mutex_);
    const std::shared_ptr<const RowLayout> from = layout();
    const auto to =
        std::make_shared<const RowLayout>(value_type_, dim_, slots, from->generation + 1, from.get());
    if (from->slots == slots) return from->generation;
    // All that may fail comes first, for all shards: from then on every shard changes.
    const RowStore::ConvertRows convert = RowConverter(*from, *to);
    const int64_t shards = static_cast<int64_t>(shards_.size());
    int64_t prepared = 0;
    try {
      for (; prepared < shards; ++prepared) {
        Shard& shard = *shards_[static_cast<size_t>(prepared)];
        std::lock_guard<RwSpinlock> hold(shard.lock);
        shard.rows.PrepareRelayout(to->row_bytes);
      }
    } catch (...) {
      while (prepared-- > 0) {
        Shard& shard = *shards_[static_cast<size_t>(prepared)];
        std::lock_guard<RwSpinlock> hold(shard.lock);
        shard.rows.CancelRelayout();
      }
      throw;
    }
    const auto change = [&](int64_t s) {
      Shard& shard = *shards_[static_cast<size_t>(s)];
      std::lock_guard<RwSpinlock> hold(shard.lock);
      if (shard.layout == to) return;
      shard.rows.Relayout(convert);
      shard.layout = to;
    };
    try {
      RunTasks(threads, shards, change);
    } catch (...) {  // the threads could not be had; see to what they left
      for (int64_t s = 0; s < shards; ++s) change(s);
    }
    std::lock_guard<std::mutex> hold(state_mutex_);
    layout_ = to;
    generation_.store(to->generation, std::memory_order_release);
    return to->generation;
  }

  std::unique_ptr<Exporter> Export() const override { return std::make_unique<ExporterImpl>(this); }

  void Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const uint64_t*, ParallelFor& threads) override {
    const char* values = nullptr;
    for (const ColumnIn& column : in) {
      if (column.column == 0) values = static_cast<const char*>(column.data);
    }
    WriteColumns(
        keys, n, in, threads,
        [](Shard& shard, int64_t count) {
          shard.zeroed.Prepare(size_t{shard.rows.high_water()} + static_cast<size_t>(count));
        },
        [=](Shard& shard, uint32_t row, int64_t i) {
          RowStamp& stamp = *shard.rows.StampOf(row);
          stamp.frequency = freqs == nullptr ? 0 : freqs[i];
          stamp.version = versions == nullptr ? 0 : versions[i];
          if (values != nullptr && IsZero(values + i * value_bytes_)) shard.zeroed.Mark(row);
        });
  }

  int64_t max_capacity() const override { return 0; }
  Eviction eviction() const override { return Eviction::kLru; }
  int64_t EvictedCount() const override { return 0; }
  void Scores(const void*, int64_t n, uint64_t* scores, ParallelFor&) const override {
    std::memset(scores, 0, static_cast<size_t>(n) * sizeof(uint64_t));
  }
  int64_t SetScores(const void*, int64_t, const uint64_t*, ParallelFor&) override {
    throw Error(ErrorCode::kFailedPrecondition,
                "The table keeps no scores, for it is not bounded. Make it with a max_capacity.");
  }
  void SetEpoch(uint32_t) override {
    throw Error(ErrorCode::kFailedPrecondition,
                "The table has no epochs, for it is not bounded. Make it with a max_capacity.");
  }

  void SetInitializer(const Initializer& initializer) override {
    auto made = std::make_shared<const InitialValue>(initializer, value_type_, dim_);
    std::lock_guard<std::mutex> hold(state_mutex_);
    initial_ = std::move(made);
  }

 private:
  friend class ExporterImpl;

  std::shared_ptr<const RowLayout> layout() const {
    std::lock_guard<std::mutex> hold(state_mutex_);
    return layout_;
  }
  std::shared_ptr<const InitialValue> initial() const {
    std::lock_guard<std::mutex> hold(state_mutex_);
    return initial_;
  }

  // Throws unless the rows of a shard have the column that is meant.
  template <class Column>
  static const RowLayout::Column& CheckColumn(const Shard& shard, const Column& column) {
    return shard.layout->At(column.column, column.width, column.generation);
  }

  // For WriteGroup: nothing is known of where rows are.
  struct NoHint {
    KVTABLE_ALWAYS_INLINE uint32_t operator()(int64_t) const { return BucketIndex::kNoRow; }
  };

  bool IsZero(const char* value) const {
    return VisitAnyValueType(value_type_, [&](auto t) {
      using T = decltype(t);
      const T* const elements = reinterpret_cast<const T*>(value);
      return std::all_of(elements, elements + dim_, [](T x) { return Element<T>::Load(x) == 0; });
    });
  }

  // The shared locks of a set of shards, a bit for each.
  class SharedLocks {
   public:
    SharedLocks(const TableImpl& table, uint64_t shards) : table_(table), shards_(shards) {
      for (uint64_t left = shards; left != 0; left &= left - 1) At(left).lock.lock_shared();
    }
    ~SharedLocks() {
      for (uint64_t left = shards_; left != 0; left &= left - 1) At(left).lock.unlock_shared();
    }
    SharedLocks(const SharedLocks&) = delete;
    SharedLocks& operator=(const SharedLocks&) = delete;

   private:
    const Shard& At(uint64_t left) const {
      return *table_.shards_[static_cast<size_t>(__builtin_ctzll(left))];
    }
    const TableImpl& table_;
    const uint64_t shards_;
  };

  // Looks up keys[begin, end) block by block under shared locks: check(shard) once for each shard of a block,
  // which may throw; locate(i, number of shard, shard, row) -> pointer for each key that is there; then
  // prefetch(shard, pointer) and some steps later visit(i, shard, pointer), with null for a missing key.
  template <class Key, class Check, class Locate, class Prefetch, class Visit>
  void ReadRange(const Key* keys, int64_t begin, int64_t end, const Check& check, const Locate& locate,
                 const Prefetch& prefetch, const Visit& visit) const {
    using Pointer = decltype(locate(int64_t{0}, size_t{0}, *shards_[0], uint32_t{0}));
    const std::unique_ptr<Shard>* const shards = shards_.data();
    // The key's hash, and from its first step on its home bucket, with the shard in the bits that alignment
    // leaves.
    std::array<uint64_t, kBlock> homes;
    static_assert(alignof(Bucket) == kMaxShards);
    // What the search for key i has come to: null, the pointer, or the bucket to search next.
    std::array<uintptr_t, kBlock> found;
    // Marks the last: a bit that no address of a process has.
    constexpr uintptr_t kUnfinished = uintptr_t{1} << 63;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t count = std::min(kBlock, end - block);
      const Key* const block_keys = keys + block;
      uint64_t touched = 0;
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t hash = Mix64(WidenKey(block_keys[i]));
        homes[static_cast<size_t>(i)] = hash;
        touched |= uint64_t{1} << ShardOf(hash, shard_bits_);
      }
      const SharedLocks hold(*this, touched);
      for (uint64_t left = touched; left != 0; left &= left - 1) {
        check(*shards_[static_cast<size_t>(__builtin_ctzll(left))]);
      }
      // First where the rows are, then the rows: each pass asks for memory some steps before it reads it, and
      // the second does nothing else.
      const auto shard_at = [&](int64_t i) KVTABLE_ALWAYS_INLINE -> const Shard& {
        return *shards[homes[static_cast<size_t>(i)] % kMaxShards];
      };
      const auto home_at = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        return reinterpret_cast<const Bucket*>(homes[static_cast<size_t>(i)] / kMaxShards * kMaxShards);
      };
      const auto located = [&](int64_t i, uint32_t row) KVTABLE_ALWAYS_INLINE {
        const size_t shard = homes[static_cast<size_t>(i)] % kMaxShards;
        return reinterpret_cast<uintptr_t>(locate(block + i, shard, *shards[shard], row));
      };
      const auto prefetch_bucket = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        uint64_t& home = homes[static_cast<size_t>(i)];
        const size_t shard = static_cast<size_t>(ShardOf(home, shard_bits_));
        const Bucket* const bucket = shards[shard]->index.Home(home);
        __builtin_prefetch(bucket);
        home = reinterpret_cast<uintptr_t>(bucket) | shard;
      };
      const auto search_home = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        const Bucket* const home = home_at(i);
        const uint32_t row = BucketIndex::Match(WidenKey(block_keys[i]), home);
        uintptr_t& place = found[static_cast<size_t>(i)];
        if (__builtin_expect(row != BucketIndex::kNoRow, 1)) {
          place = located(i, row);
        } else {
          const Bucket* const next = shard_at(i).index.Next(home, home);
          __builtin_prefetch(next);
          place = next == nullptr ? 0 : reinterpret_cast<uintptr_t>(next) | kUnfinished;
        }
      };
      const auto search_on = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        uintptr_t& place = found[static_cast<size_t>(i)];
        if (__builtin_expect((place & kUnfinished) == 0, 1)) return;
        const Bucket* const next = reinterpret_cast<const Bucket*>(place - kUnfinished);
        const uint32_t row = shard_at(i).index.FindFrom(WidenKey(block_keys[i]), next, home_at(i));
        place = row == BucketIndex::kNoRow ? 0 : located(i, row);
      };
      const auto prefetch_row = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        const uintptr_t place = found[static_cast<size_t>(i)];
        if (place != 0) prefetch(shard_at(i), reinterpret_cast<Pointer>(place));
      };
      for (int64_t i = 0; i < std::min(2 * kAhead, count); ++i) prefetch_bucket(i);
      for (int64_t i = 0; i < std::min(kAhead, count); ++i) search_home(i);
      for (int64_t i = 0; i < count; ++i) {
        if (i + 2 * kAhead < count) prefetch_bucket(i + 2 * kAhead);
        if (i + kAhead < count) search_home(i + kAhead);
        search_on(i);
      }
      for (int64_t i = 0; i < std::min(kRowsAhead, count); ++i) prefetch_row(i);
      for (int64_t i = 0; i < count; ++i) {
        if (i + kRowsAhead < count) prefetch_row(i + kRowsAhead);
        visit(block + i, shard_at(i), reinterpret_cast<Pointer>(found[static_cast<size_t>(i)]));
      }
    }
  }

  // Copies the values of keys[begin, end) to their places, and calls missed(i) for the keys that are not
  // there.
  template <class Key, class Missed>
  void ReadValues(const Key* keys, int64_t begin, int64_t end, const RowsOut& out, bool* found,
                  const Missed& missed) const {
    const int64_t bytes = value_bytes_;
    VisitRowBytes(bytes, [&](auto known) {
      constexpr int64_t kBytes = decltype(known)::value;
      ReadRange(
          keys, begin, end, [](const Shard&) {},
          [&out, bytes](int64_t i, size_t number, const Shard& shard, uint32_t row)
              KVTABLE_ALWAYS_INLINE -> const char* {
                const int64_t place = out.PlaceOf(i);
                // Rows written one behind the other are foreseen by the hardware, scattered ones are not.
                if (out.where != nullptr) PrefetchRow<kBytes, true>(out.rows + place * bytes, bytes);
                if (out.positions != nullptr) out.positions[place] = uint64_t{number} << 32 | row;
                return shard.rows.Row(row);
              },
          [bytes](const Shard&, const char* row) KVTABLE_ALWAYS_INLINE { PrefetchRow<kBytes>(row, bytes); },
          [&](int64_t i, const Shard&, const char* row) {
            if (found != nullptr) found[i] = row != nullptr;
            const int64_t place = out.PlaceOf(i);
            if (row != nullptr) {
              CopyRow<kBytes>(out.rows + place * bytes, row, bytes);
            } else {
              if (out.positions != nullptr) out.positions[place] = kNoPosition;
              missed(i);
            }
          });
    });
  }

  // Finds or makes the row of each key of a group, under the shard's exclusive lock: check(shard) first,
  // which may throw; prefetch_input(i) some steps ahead; write(shard, row, key, i, is_new) in the order of
  // the batch. hint(i) is the number of the row where key i was seen last, or kNoRow.
  template <class Check, class Hint, class PrefetchInput, class Write>
  void WriteGroup(const ShardGroups::Group& group, const Check& check, const Hint& hint,
                  const PrefetchInput& prefetch_input, const Write& write) {
    Shard& shard = *shards_[static_cast<size_t>(group.shard)];
    std::lock_guard<RwSpinlock> hold(shard.lock);
    check(shard);
    const int64_t row_bytes = shard.rows.row_bytes();
    const uint32_t known_rows = shard.rows.high_water();
    const auto has_hint = [&](int64_t i)
                              KVTABLE_ALWAYS_INLINE { return hint(group.positions[i]) < known_rows; };
    const auto prefetch_bucket = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      if (!has_hint(i)) __builtin_prefetch(shard.index.Home(Mix64(group.keys[i])), 1);
    };
    const auto prefetch_row = [&](uint32_t row) KVTABLE_ALWAYS_INLINE {
      PrefetchRow<kAnyBytes, true>(shard.rows.Row(row), row_bytes);
      __builtin_prefetch(shard.rows.StampOf(row), 1);
    };
    // What is known of key i, at i modulo the size: its row, or kNoRow; then where the search goes on, or
    // null. A row that was found stays the key's: nobody else may remove it now.
    std::array<uint32_t, kAhead> found;
    std::array<const Bucket*, kAhead> next;
    const auto search_home = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      uint32_t& row = found[static_cast<size_t>(i % kAhead)];
      const Bucket*& on = next[static_cast<size_t>(i % kAhead)];
      on = nullptr;
      if (has_hint(i)) {
        row = hint(group.positions[i]);
        prefetch_row(row);
      } else {
        const uint64_t key = group.keys[i];
        const Bucket* const home = shard.index.Home(Mix64(key));
        row = BucketIndex::Match(key, home);
        if (row != BucketIndex::kNoRow) {
          prefetch_row(row);
        } else {
          on = shard.index.Next(home, home);
          __builtin_prefetch(on, 1);
        }
      }
      prefetch_input(group.positions[i]);
    };
    const auto search_on = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      const Bucket* const on = next[static_cast<size_t>(i % kAhead)];
      if (on == nullptr) return;
      const uint64_t key = group.keys[i];
      uint32_t& row = found[static_cast<size_t>(i % kAhead)];
      row = shard.index.FindFrom(key, on, shard.index.Home(Mix64(key)));
      if (row != BucketIndex::kNoRow) prefetch_row(row);
    };
    const Bucket* first_bucket = shard.index.Home(0);
    for (int64_t i = 0; i < std::min(2 * kAhead, group.count); ++i) prefetch_bucket(i);
    for (int64_t i = 0; i < std::min(kAhead, group.count); ++i) search_home(i);
    for (int64_t i = 0; i < group.count; ++i) {
      if (i + 2 * kAhead < group.count) prefetch_bucket(i + 2 * kAhead);
      if (i + kAhead / 2 < group.count) search_on(i + kAhead / 2);
      const uint64_t key = group.keys[i];
      bool is_new = false;
      uint32_t row = found[static_cast<size_t>(i % kAhead)];
      const bool still = row != BucketIndex::kNoRow &&
                         (!has_hint(i) || (shard.rows.StampOf(row)->key == key && shard.rows.IsLive(row)));
      if (!still) row = shard.FindOrInsert(key, Mix64(key), &is_new);
      if (i + kAhead < group.count) search_home(i + kAhead);  // takes the place of key i
      shard.zeroed.Unmark(row);
      if (is_new && shard.index.Home(0) != first_bucket) {  // the index grew: its old buckets are gone
        next.fill(nullptr);
        first_bucket = shard.index.Home(0);
      }
      write(shard, row, key, group.positions[i], is_new);
    }
  }

  template <class Check, class PrefetchInput, class Write>
  void WriteBatch(const void* keys, int64_t n, ParallelFor& threads, const Check& check,
                  const PrefetchInput& prefetch_input, const Write& write) {
    CheckBatch(n);
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      const ShardGroups groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads);
      RunTasks(threads, groups.size(),
               [&](int64_t g) { WriteGroup(groups[g], check, NoHint{}, prefetch_input, write); });
    });
  }

  // prepare(shard, n) for each shard, which may throw; then the named columns of each row, and
  // finish(shard, row, i).
  template <class Prepare, class Finish>
  void WriteColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, ParallelFor& threads,
                    const Prepare& prepare, const Finish& finish) {
    const std::shared_ptr<const InitialValue> init = initial();
    const bool has_value =
        std::any_of(in.begin(), in.end(), [](const ColumnIn& column) { return column.column == 0; });
    WriteBatch(
        keys, n, threads,
        [&](Shard& shard) {
          for (const ColumnIn& column : in) CheckColumn(shard, column);
          prepare(shard, n);
        },
        [](int64_t) {},
        [&](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
          const RowLayout& layout = *shard.layout;
          char* const at = shard.rows.Row(row);
          const auto write = [&](bool slots) {
            for (const ColumnIn& column : in) {
              if ((column.column > 0) != slots) continue;
              const RowLayout::Column& c = layout.columns[static_cast<size_t>(column.column)];
              std::memcpy(at + c.offset, static_cast<const char*>(column.data) + i * c.bytes,
                          static_cast<size_t>(c.bytes));
            }
          };
          if (is_new && !has_value) init->Fill(key, at);
          write(false);
          if (is_new) layout.InitializeSlots(at);  // some copy the value
          write(true);
          finish(shard, row, i);
        });
  }

  // The keys of one shard in a training step.
  ApplyCounts ApplyGroup(const ShardGroups::Group& group, const uint64_t* positions, const char* gradients,
                         const Update& update, const RowUpdater& updater, const SlotColumns& slots,
                         Stamp stamp, const InitialValue& init) {
    const size_t n = static_cast<size_t>(group.count);
    const int64_t bytes = value_bytes_;
    const GradientSum sum(value_type_, dim_);
    const auto gradient_at = [&](uint32_t i) { return gradients + int64_t{group.positions[i]} * bytes; };

    // Equal keys: `first` names each distinct key's first occurrence, `next` leads from one to the next.
    constexpr uint32_t kEnd = UINT32_MAX;
    Scratch<uint64_t> keys(n);
    Scratch<uint32_t> first(n);
    Scratch<uint32_t> last(n);
    Scratch<uint32_t> next(n);
    uint32_t distinct = NumberDistinctKeys(group.keys, static_cast<uint32_t>(n), keys.data(),
                                           [&](uint32_t i, uint32_t number, bool is_first) {
                                             next[i] = kEnd;
                                             if (is_first) {
                                               first[number] = i;
                                             } else {
                                               next[last[number]] = i;
                                             }
                                             last[number] = i;
                                           });

    Scratch<uint64_t> summed(sum.bytes() / 8 + 1);
    const auto sum_of = [&](uint32_t i) -> const void* {
      if (next[i] == kEnd && sum.same_type()) return gradient_at(i);
      sum.Set(summed.data(), gradient_at(i));
      for (uint32_t j = next[i]; j != kEnd; j = next[j]) sum.Add(summed.data(), gradient_at(j));
      return summed.data();
    };
    ApplyCounts counts;
    if (update.skip_nonfinite) {
      uint32_t kept = 0;
      for (uint32_t u = 0; u < distinct; ++u) {
        if (!sum.IsFinite(sum_of(first[u]))) continue;
        keys[kept] = keys[u];
        first[kept++] = first[u];
      }
      counts.skipped = distinct - kept;
      distinct = kept;
    }
    counts.updated = distinct;
    if (distinct == 0) return counts;

    Scratch<uint64_t> scratch(updater.scratch_bytes() / 8 + 1);
    std::vector<int64_t> offsets(1 + slots.columns.size());
    std::vector<void*> columns(1 + slots.columns.size());
    const auto check = [&](Shard& shard) {
      for (size_t c = 0; c < slots.columns.size(); ++c) {
        offsets[c + 1] = shard.layout->At(slots.columns[c], dim_, slots.generation).offset;
      }
      if (update.optimizer->zeroes_rows) shard.zeroed.Prepare(size_t{shard.rows.high_water()} + distinct);
    };
    const auto prefetch_input = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
      PrefetchRow<kAnyBytes>(gradient_at(static_cast<uint32_t>(i)), bytes);
    };
    const auto write = [&](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
      char* const at = shard.rows.Row(row);
      if (is_new) {
        init.Fill(key, at);
        shard.layout->InitializeSlots(at);
      }
      for (size_t c = 0; c < columns.size(); ++c) columns[c] = at + offsets[c];
      if (updater(columns.data(), sum_of(static_cast<uint32_t>(i)), key, scratch.data())) {
        shard.zeroed.Mark(row);
      }
      StampRow(shard.rows.StampOf(row), stamp);
    };
    const ShardGroups::Group each{group.shard, keys.data(), first.data(), distinct};
    if (positions == nullptr) {
      WriteGroup(each, check, NoHint{}, prefetch_input, write);
    } else {
      const uint64_t shard = static_cast<uint64_t>(group.shard);
      const auto hint = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
        const uint64_t position = positions[group.positions[i]];
        return position >> 32 == shard ? static_cast<uint32_t>(position) : BucketIndex::kNoRow;
      };
      WriteGroup(each, check, hint, prefetch_input, write);
    }
    return counts;
  }

  // Keeps the keys of `misses` that are admitted, and writes zeros for the others.
  template <class Key>
  int64_t KeepAdmitted(const Key* keys, uint32_t* misses, int64_t count, const RowsOut& out,
                       const Insertion& insertion) const {
    const Admission admission(insertion.admission, insertion.admission_seed);
    int64_t kept = 0;
    for (int64_t m = 0; m < count; ++m) {
      const uint32_t i = misses[m];
      if (admission.Admits(WidenKey(keys[i]))) {
        misses[kept++] = i;
      } else {
        std::memset(out.rows + out.PlaceOf(i) * value_bytes_, 0, static_cast<size_t>(value_bytes_));
      }
    }
    return kept;
  }

  // The second half of GatherOrInsert: keys that the lookup missed.
  void InsertMissed(const ShardGroups::Group& group, const InitialValue& init, Stamp stamp,
                    const RowsOut& out, bool* inserted) {
    // Which rows are new in this call, so that a duplicate of a new key is told from a key that another
    // thread inserted between the lookup and now. Row numbers from `first_new` on are; a row that was removed
    // before is remembered.
    uint32_t first_new = 0;
    std::unordered_set<uint32_t> reused;
    WriteGroup(
        group, [&](const Shard& shard) { first_new = shard.rows.high_water(); }, NoHint{},
        [&](int64_t i) KVTABLE_ALWAYS_INLINE {
          PrefetchRow<kAnyBytes, true>(out.rows + out.PlaceOf(i) * value_bytes_, value_bytes_);
        },
        [&](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
          char* const at = shard.rows.Row(row);
          if (is_new) {
            init.Fill(key, at);
            shard.layout->InitializeSlots(at);
            if (row < first_new) reused.insert(row);
          }
          if (row >= first_new || (!reused.empty() && reused.count(row) != 0)) {
            StampRow(shard.rows.StampOf(row), stamp);
            if (inserted != nullptr) inserted[i] = true;
          }
          const int64_t place = out.PlaceOf(i);
          std::memcpy(out.rows + place * value_bytes_, at, static_cast<size_t>(value_bytes_));
          if (out.positions != nullptr) {
            out.positions[place] = static_cast<uint64_t>(group.shard) << 32 | row;
          }
        });
  }

  // What turns rows of one layout into rows of another, for as long as both are there.
  static RowStore::ConvertRows RowConverter(const RowLayout& from, const RowLayout& to) {
    // For each new slot the old column it continues, or -1.
    std::vector<int> source;
    for (const SlotSpec& slot : to.slots) {
      int at = -1;
      for (size_t i = 0; i < from.slots.size(); ++i) {
        if (from.slots[i].name == slot.name && from.slots[i].width == slot.width)
          at = static_cast<int>(i) + 1;
      }
      source.push_back(at);
    }
    return [&from, &to, source](const char* old_row, char* new_row, uint32_t rows) {
      for (uint32_t r = 0; r < rows; ++r, old_row += from.row_bytes, new_row += to.row_bytes) {
        std::memcpy(new_row, old_row, static_cast<size_t>(from.value_bytes));
        for (size_t i = 0; i < source.size(); ++i) {
          const RowLayout::Column& c = to.columns[i + 1];
          if (source[i] < 0) {
            to.InitializeSlot(static_cast<int>(i) + 1, new_row);
          } else {
            std::memcpy(new_row + c.offset, old_row + from.columns[static_cast<size_t>(source[i])].offset,
                        static_cast<size_t>(c.bytes));
          }
        }
      }
    };
  }

  const KeyType key_type_;
  const ValueType value_type_;
  const int64_t dim_;
  const int64_t value_bytes_;
  int shard_bits_ = 0;
  std::vector<std::unique_ptr<Shard>> shards_;

  std::mutex schema_mutex_;
  mutable std::mutex state_mutex_;
  std::shared_ptr<const RowLayout> layout_;  // what all shards have, or had until EnsureSlots began
  std::shared_ptr<const InitialValue> initial_;
  std::atomic<uint64_t> generation_{1};  // of layout_
  std::atomic<int64_t> skipped_updates_{0};
};

// ---- Export
// ------------------------------------------------------------------------------------------------------

ExporterImpl::ExporterImpl(const TableImpl* table) : table_(table) {
  for (const auto& shard : table->shards_) {
    std::shared_lock<RwSpinlock> hold(shard->lock);
    ends_.push_back(shard->rows.high_water());
  }
}

int64_t ExporterImpl::max_rows() const {
  int64_t rows = 0;
  for (size_t s = static_cast<size_t>(shard_); s < ends_.size(); ++s) rows += ends_[s];
  return rows - row_;
}

// Picks up to `capacity` live rows, then copies them out in parallel. A row may be removed in between, which
// leaves a gap that is closed at the end.
int64_t ExporterImpl::Next(int64_t capacity, const Buffers& out, ParallelFor& threads) {
  capacity = std::min(capacity, max_rows());
  if (capacity <= 0) return 0;
  for (;;) {
    Scratch<uint64_t> picks(static_cast<size_t>(capacity));  // shard << 32 | row
    int64_t count = 0;
    while (count < capacity && shard_ < static_cast<int>(ends_.size())) {
      const Shard& shard = *table_->shards_[static_cast<size_t>(shard_)];
      {
        std::shared_lock<RwSpinlock> hold(shard.lock);
        const uint32_t end = std::min(ends_[static_cast<size_t>(shard_)], shard.rows.high_water());
        const uint64_t high = static_cast<uint64_t>(shard_) << 32;
        if (row_ < end) {
          row_ = shard.rows.ForEachLive(row_, end, [&](uint32_t row) {
            if (count == capacity) return false;
            picks[static_cast<size_t>(count++)] = high | row;
            return true;
          });
        }
        if (row_ < end) break;
      }
      ++shard_;
      row_ = 0;
    }
    if (count == 0) return 0;
    const Ranges ranges(count, kLeastKeysPerTask, threads);
    Scratch<int64_t> written(static_cast<size_t>(ranges.count()));
    VisitKeyType(table_->key_type_, [&](auto k) {
      RunTasks(threads, ranges.count(), [&](int64_t r) {
        written[static_cast<size_t>(r)] = Write<decltype(k)>(
            picks.data() + ranges.begin(r), ranges.end(r) - ranges.begin(r), ranges.begin(r), out);
      });
    });
    int64_t total = written[0];
    const int64_t element_bytes = SizeOf(table_->value_type_);
    const auto move_down = [&](void* column, int64_t bytes, int64_t from, int64_t rows) {
      if (column == nullptr) return;
      char* const base = static_cast<char*>(column);
      std::memmove(base + total * bytes, base + from * bytes, static_cast<size_t>(rows * bytes));
    };
    for (int64_t r = 1; r < ranges.count(); ++r) {
      const int64_t from = ranges.begin(r);
      const int64_t rows = written[static_cast<size_t>(r)];
      if (from != total) {
        move_down(out.keys, SizeOf(table_->key_type_), from, rows);
        move_down(out.freqs, 4, from, rows);
        move_down(out.versions, 4, from, rows);
        for (const ColumnOut& column : out.columns) {
          move_down(column.data, column.width * element_bytes, from, rows);
        }
      }
      total += rows;
    }
    if (out.scores != nullptr) std::memset(out.scores, 0, static_cast<size_t>(total) * sizeof(uint64_t));
    if (total > 0) return total;  // else all that were picked have gone: look further
  }
}

// Writes the rows that are still there to `out` from row `at` on, and returns how many.
template <class Key>
int64_t ExporterImpl::Write(const uint64_t* picks, int64_t count, int64_t at, const Buffers& out) const {
  const int64_t first = at;
  for (int64_t begin = 0; begin < count;) {
    const uint64_t shard_number = picks[begin] >> 32;
    int64_t end = begin;
    while (end < count && end - begin < kBlock && picks[end] >> 32 == shard_number) ++end;
    const Shard& shard = *table_->shards_[shard_number];
    std::shared_lock<RwSpinlock> hold(shard.lock);
    std::vector<RowLayout::Column> columns;
    for (const ColumnOut& column : out.columns) columns.push_back(TableImpl::CheckColumn(shard, column));
    for (; begin < end; ++begin) {
      const uint32_t row = static_cast<uint32_t>(picks[begin]);
      if (row >= shard.rows.high_water() || !shard.rows.IsLive(row)) continue;
      const RowStamp& stamp = *shard.rows.StampOf(row);
      if (out.keys != nullptr) static_cast<Key*>(out.keys)[at] = static_cast<Key>(stamp.key);
      if (out.freqs != nullptr) out.freqs[at] = stamp.frequency;
      if (out.versions != nullptr) out.versions[at] = stamp.version;
      const char* const from = shard.rows.Row(row);
      for (size_t c = 0; c < columns.size(); ++c) {
        std::memcpy(static_cast<char*>(out.columns[c].data) + at * columns[c].bytes, from + columns[c].offset,
                    static_cast<size_t>(columns[c].bytes));
      }
      ++at;
    }
  }
  return at - first;
}

}  // namespace

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
  auto table = std::make_unique<TableImpl>(options);
  if (options.max_capacity == 0) return table;
  return BoundTable(std::move(table), options.max_capacity, options.eviction, options.clock);
}

}  // namespace kvtable
