// The training lookup: a read, then a write of what it missed.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "admission/admission_draw.h"
#include "memory/scratch.h"
#include "table/check_batch.h"
#include "table/read_range.h"
#include "table/row_set.h"
#include "table/write_groups.h"

namespace kvtable {
namespace {

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

void ShardedTable::GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                                  ParallelFor& threads) {
  CheckBatch(n);
  if (!(insertion.admission >= 0.0 && insertion.admission <= 1.0)) {
    ThrowInvalid("An admission probability of " + std::to_string(insertion.admission) +
                 "; expected 0.0 to 1.0.");
  }
  const RowsWriter rows(out, value_type_, dim_);
  const bool admits_all = insertion.admission == 1.0 && insertion.admitter == nullptr;
  // Rows in the file come into memory by way of the insert, for an update is going to want them there; but where missed
  // keys are counted, they are none.
  const bool brings_in = spill_ != nullptr && admits_all;
  std::optional<AdmittedKeys> admitted;
  if (insertion.admitter != nullptr) admitted.emplace(insertion.admitter);
  const BatchTime time = ages_.Begin();
  const Stamp stamp = ages_.StampAt(time, insertion.stamp);
  if (insertion.inserted != nullptr) std::memset(insertion.inserted, 0, static_cast<size_t>(n));
  looked_up_.fetch_add(n, std::memory_order_relaxed);
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const Key* const typed = static_cast<const Key*>(keys);
    const Ranges ranges(n, kLeastKeysPerTask, threads);
    Scratch<uint32_t> misses(static_cast<size_t>(n));
    Scratch<int64_t> miss_counts(static_cast<size_t>(ranges.count()));
    RunTasks(threads, ranges.count(), [&](int64_t r) {
      uint32_t* const missed = misses.data() + ranges.begin(r);
      int64_t count = 0;
      int64_t block = ranges.begin(r);
      int64_t before = 0;
      const auto mostly_there = [&](int64_t next_block) {
        const bool mostly_new = admits_all && 2 * (count - before) > next_block - block;
        block = next_block;
        before = count;
        return !mostly_new;
      };
      const int64_t end = ReadValues(
          time, typed, ranges.begin(r), ranges.end(r), out, nullptr, mostly_there,
          [&](int64_t i) { missed[count++] = static_cast<uint32_t>(i); }, brings_in);
      // Where most of a block was new, the rest will hardly fare better: the insert finds what is there just as well.
      for (int64_t i = end; i < ranges.end(r); ++i) missed[count++] = static_cast<uint32_t>(i);
      miss_counts[static_cast<size_t>(r)] = count;
    });
    int64_t total = miss_counts[0];
    for (int64_t r = 1; r < ranges.count(); ++r) {
      const int64_t count = miss_counts[static_cast<size_t>(r)];
      std::memmove(misses.data() + total, misses.data() + ranges.begin(r), static_cast<size_t>(count) * 4);
      total += count;
    }
    if (total == 0) return;
    const std::shared_ptr<const InitialValue> init = initial();
    Scratch<uint32_t> first(admitted ? static_cast<size_t>(n) : 0);
    if (!admits_all || padding_key_) {
      const int64_t missing = total;
      total = KeepAdmitted(typed, misses.data(), total, out, rows, insertion, *init,
                           admitted ? &*admitted : nullptr, first.data(), threads);
      held_back_.fetch_add(missing - total, std::memory_order_relaxed);
    }
    if (total == 0) return;
    AwaitOwnRoomAside();
    ShardGroups<Key> groups(typed, misses.data(), total, shard_bits_, threads.threads());
    ForGroups(groups, threads, [&](const ShardGroup& group) {
      InsertMissed(time, group, *init, stamp, out, rows, admitted ? first.data() : nullptr,
                   insertion.inserted);
    });
  });
}

template <class Key>
int64_t ShardedTable::KeepAdmitted(const Key* keys, uint32_t* misses, int64_t count, const RowsOut& out,
                                   const RowsWriter& rows, const Insertion& insertion,
                                   const InitialValue& init, AdmittedKeys* admitted, uint32_t* first,
                                   ParallelFor& threads) const {
  const auto leave_out = [&](uint32_t i) {
    if (insertion.below == Missing::kInitial) {
      rows.Make(i, [&](char* to) { init.Fill(WidenKey(keys[i]), to); });
    } else {
      rows.Zero(i);
    }
    // Where most of a block is new, the rest of it is not even looked up.
    if (out.positions != nullptr) out.positions[out.PlaceOf(i)] = kNoPosition;
  };
  const AdmissionDraw draw(insertion.admission, insertion.admission_seed, padding_key_);
  int64_t kept = 0;
  for (int64_t m = 0; m < count; ++m) {
    if (draw.Admits(WidenKey(keys[misses[m]]))) {
      misses[kept++] = misses[m];
    } else {
      leave_out(misses[m]);
    }
  }
  if (admitted == nullptr || kept == 0) return kept;
  std::vector<uint64_t> missed(static_cast<size_t>(kept));
  for (int64_t m = 0; m < kept; ++m) missed[static_cast<size_t>(m)] = WidenKey(keys[misses[m]]);
  const uint32_t* const starts =
      admitted->Admit(std::move(missed), [&](const uint64_t* wide, int64_t n, bool* there) {
        Scratch<Key> narrow(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) narrow.data()[i] = static_cast<Key>(wide[i]);
        Contains(narrow.data(), n, there, threads);
      });
  count = kept;
  kept = 0;
  for (int64_t m = 0; m < count; ++m) {
    if (starts[m] == Admitter::kLeftOut) {
      leave_out(misses[m]);
      continue;
    }
    first[misses[m]] = starts[m];
    misses[kept++] = misses[m];
  }
  return kept;
}

void ShardedTable::InsertMissed(const BatchTime& time, const ShardGroup& group, const InitialValue& init,
                                Stamp stamp, const RowsOut& out, const RowsWriter& rows,
                                const uint32_t* first, bool* inserted) {
  // Which rows are new in this call, so that a duplicate of a new key is told from a key that another
  // thread inserted between the lookup and now. Row numbers from `first_new` on are; a row that was removed
  // before is remembered.
  uint32_t first_new = 0;
  RowSet reused;
  int64_t born = 0;
  // A row that is there already is only read.
  WriteGroup<true>(
      time, group, false, [&](const Shard& shard) { first_new = shard.rows.high_water(); },
      [&](int64_t i) KVTABLE_ALWAYS_INLINE { PrefetchRow<kAnyBytes, true>(rows.At(i), rows.bytes()); },
      [&](Shard& shard, uint32_t row, uint64_t key, int64_t i, bool is_new) {
        char* const at = shard.rows.Row(row);
        if (is_new) {
          init.Fill(key, at);
          shard.layout->InitializeSlots(at);
          ++born;
          if (row < first_new) {
            reused.Prepare(row);
            reused.Add(row);
          }
          if (first != nullptr) shard.rows.StampOf(row)->frequency = first[i];
        }
        if (row >= first_new || reused.Has(row)) {
          StampRow(shard.rows.StampOf(row), stamp);
          if (inserted != nullptr) inserted[i] = true;
        }
        rows.Copy(i, at);
        if (out.positions != nullptr) {
          out.positions[out.PlaceOf(i)] = static_cast<uint64_t>(group.shard) << 32 | row;
        }
      });
  born_.fetch_add(born, std::memory_order_relaxed);
}

}  // namespace kvtable
