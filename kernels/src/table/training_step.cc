// One step of an optimizer over a batch's rows.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "lookups/distinct_keys.h"
#include "memory/scratch.h"
#include "table/check_batch.h"
#include "table/write_groups.h"

namespace kvtable {
namespace {

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

ApplyCounts ShardedTable::ApplyGroup(const BatchTime& time, const ShardGroups::Group& group,
                                     const char* gradients, const Update& update, const RowUpdater& updater,
                                     const std::vector<int64_t>& offsets, Stamp stamp,
                                     const InitialValue& init) {
  const size_t n = static_cast<size_t>(group.count);
  const GradientSum sum(update, value_type_, dim_);
  const int64_t bytes = sum.row_bytes();
  const auto gradient_at = [&](uint32_t i) KVTABLE_ALWAYS_INLINE {
    return gradients + int64_t{group.positions[i]} * bytes;
  };

  // Equal keys: `first` names each distinct key's first occurrence, `next` leads from one to the next.
  Scratch<uint32_t> first(n);
  Scratch<uint32_t> next(n);
  uint32_t distinct = ChainEqualKeys(group.keys, static_cast<uint32_t>(n), first.data(), next.data());

  Scratch<uint64_t> summed(sum.bytes() / 8 + 1);
  const auto sum_of = [&](uint32_t i) KVTABLE_ALWAYS_INLINE -> const void* {
    if (next[i] == kNoMore && sum.same_type()) return gradient_at(i);
    sum.Set(summed.data(), gradient_at(i));
    for (uint32_t j = next[i]; j != kNoMore;) {
      std::array<uint32_t, 64> some;
      size_t count = 0;
      for (; count < some.size() && j != kNoMore; j = next[j]) some[count++] = group.positions[j];
      sum.Add(summed.data(), gradients, some.data(), static_cast<int64_t>(count));
    }
    return summed.data();
  };
  ApplyCounts counts;
  if (update.skip_nonfinite) {
    uint32_t kept = 0;
    for (uint32_t u = 0; u < distinct; ++u) {
      if (sum.IsFinite(sum_of(first[u]))) first[kept++] = first[u];
    }
    counts.skipped = distinct - kept;
    distinct = kept;
  }
  if (distinct == 0) return counts;

  Scratch<uint64_t> keys(distinct == n ? 0 : distinct);
  if (distinct != n) {
    for (uint32_t u = 0; u < distinct; ++u) keys[u] = group.keys[first[u]];
  }

  Scratch<uint64_t> scratch(updater.scratch_bytes() / 8 + 1);
  std::vector<void*> columns(offsets.size());
  const auto prepare = [&](Shard& shard) {
    if (update.optimizer->zeroes_rows) shard.zeroed.Prepare(size_t{shard.rows.high_water()} + distinct);
  };
  const auto prefetch_input = [&](int64_t i) KVTABLE_ALWAYS_INLINE {
    const uint32_t one = static_cast<uint32_t>(i);
    PrefetchRow<kAnyBytes>(gradient_at(one), bytes);
    if (next[one] != kNoMore) PrefetchRow<kAnyBytes>(gradient_at(next[one]), bytes);
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
    ++counts.updated;
  };
  const ShardGroups::Group each{group.shard, distinct == n ? group.keys : keys.data(), first.data(),
                                distinct};
  if (group.hints == nullptr) {
    WriteGroup<false>(time, each, stamp.existing_only, prepare, NoHint{}, prefetch_input, write);
  } else {
    const auto hint = [&](int64_t i) KVTABLE_ALWAYS_INLINE { return group.hints[i]; };
    WriteGroup<false>(time, each, stamp.existing_only, prepare, hint, prefetch_input, write);
  }
  return counts;
}

ApplyCounts ShardedTable::Apply(const void* keys, const uint64_t* positions, int64_t n,
                                const GradientsIn& gradients, const Update& update, const SlotColumns& slots,
                                Stamp stamp, ParallelFor& threads) {
  CheckBatch(n);
  if (slots.columns.size() != update.optimizer->slots.size()) {
    ThrowInvalid(std::string("Optimizer ") + update.optimizer->name + " keeps " +
                 std::to_string(update.optimizer->slots.size()) + " slots; got columns for " +
                 std::to_string(slots.columns.size()) + ".");
  }
  const RowUpdater updater(update, value_type_, dim_);
  const std::shared_ptr<const InitialValue> init = initial();
  AwaitOwnRoomAside();
  const std::shared_lock<RwSpinlock> same_slots(slots_lock_);
  const std::shared_ptr<const RowLayout> rows = layout();
  std::vector<int64_t> offsets = {0};
  for (const int column : slots.columns) offsets.push_back(rows->At(column, dim_, slots.generation).offset);
  const BatchTime time = ages_.Begin();
  stamp.ends_step = true;
  stamp = ages_.StampAt(time, stamp);
  std::atomic<int64_t> updated{0};
  std::atomic<int64_t> skipped{0};
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const ShardGroups groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads, positions,
                             gradients.places);
    ForGroups(groups, threads, [&](const ShardGroups::Group& group) {
      const ApplyCounts counts = ApplyGroup(time, group, static_cast<const char*>(gradients.rows), update,
                                            updater, offsets, stamp, *init);
      updated.fetch_add(counts.updated, std::memory_order_relaxed);
      skipped.fetch_add(counts.skipped, std::memory_order_relaxed);
    });
  });
  ages_.End(stamp);
  skipped_updates_.fetch_add(skipped.load(), std::memory_order_relaxed);
  return {updated.load(), skipped.load()};
}

}  // namespace kvtable
