// One step of an optimizer over a batch's rows.
#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
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

ApplyCounts ShardedTable::ApplyGroup(const BatchTime& time, const ShardGroup& group, const char* gradients,
                                     const Update& update, const RowUpdater& updater,
                                     const std::vector<int64_t>& offsets, Stamp stamp,
                                     const InitialValue& init) {
  uint32_t n = static_cast<uint32_t>(group.count);
  const GradientSum sum(update, value_type_, dim_);
  Scratch<uint64_t> summed(sum.bytes() / 8 + 1);
  ApplyCounts counts;

  // The gradients of different key u are those at positions[begins[u]] to positions[begins[u + 1] - 1].
  Scratch<uint32_t> order(n);
  Scratch<uint32_t> begins(size_t{n} + 2);
  uint32_t distinct = OrderByKey(group.keys, n, order.data(), begins.data());
  const bool as_it_came = distinct == n && sum.same_type() && !update.skip_nonfinite;
  ShardGroup each = group;
  Scratch<uint64_t> keys(as_it_came ? 0 : distinct);
  Scratch<uint32_t> hints(as_it_came ? 0 : distinct);
  Scratch<uint32_t> positions(as_it_came ? 0 : n);
  if (!as_it_came) {
    for (uint32_t k = 0; k < n; ++k) positions[k] = group.positions[order[k]];
    if (update.skip_nonfinite) {
      // What is kept moves together.
      uint32_t kept = 0;
      uint32_t to = 0;
      for (uint32_t u = 0; u < distinct; ++u) {
        const uint32_t begin = begins[u];
        const uint32_t end = begins[u + 1];
        if (!sum.IsFinite(sum.Of(gradients, positions.data(), n, begin, end, summed.data()))) continue;
        begins[kept++] = to;
        for (uint32_t k = begin; k < end; ++k, ++to) {
          order[to] = order[k];
          positions[to] = positions[k];
        }
      }
      begins[kept] = to;
      counts.skipped = distinct - kept;
      distinct = kept;
      n = to;
    }
    for (uint32_t u = 0; u < distinct; ++u) keys[u] = group.keys[order[begins[u]]];
    if (group.hints != nullptr) {
      for (uint32_t u = 0; u < distinct; ++u) hints[u] = group.hints[order[begins[u]]];
      each.hints = hints.data();
    }
    each.keys = keys.data();
    each.count = distinct;
  }
  if (distinct == 0) return counts;

  Scratch<uint64_t> scratch(updater.scratch_bytes() / 8 + 1);
  std::vector<void*> columns(offsets.size());
  const auto prepare = [&](Shard& shard) {
    if (update.optimizer->zeroes_rows) shard.zeroed.Prepare(size_t{shard.rows.high_water()} + distinct);
  };
  const auto run = [&](const auto& prefetch_input, const auto& gradient_of) {
    const auto write = [&](Shard& shard, uint32_t row, uint64_t key, uint32_t i, bool is_new) {
      char* const at = shard.rows.Row(row);
      if (is_new) {
        init.Fill(key, at);
        shard.layout->InitializeSlots(at);
      }
      for (size_t c = 0; c < columns.size(); ++c) columns[c] = at + offsets[c];
      if (updater(columns.data(), gradient_of(i), key, scratch.data())) shard.zeroed.Mark(row);
      StampRow(shard.rows.StampOf(row), stamp);
      ++counts.updated;
    };
    WriteGroup<false>(time, each, stamp.existing_only, prepare, prefetch_input, write);
  };
  if (as_it_came) {
    const int64_t bytes = sum.row_bytes();
    const auto gradient_at = [=](uint32_t position)
                                 KVTABLE_ALWAYS_INLINE { return gradients + position * bytes; };
    run([=](uint32_t position)
            KVTABLE_ALWAYS_INLINE { PrefetchRow<kAnyBytes>(gradient_at(position), bytes); },
        gradient_at);
  } else {
    Scratch<uint32_t> numbers(distinct);
    std::iota(numbers.data(), numbers.data() + distinct, 0);
    each.positions = numbers.data();
    sum.Ask(gradients, positions.data(), n);  // sums ask for those that follow
    run([](uint32_t) {},
        [&](uint32_t u) KVTABLE_ALWAYS_INLINE {
          return sum.Of(gradients, positions.data(), n, begins[u], begins[u + 1], summed.data());
        });
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
    ShardGroups<Key> groups(static_cast<const Key*>(keys), nullptr, n, shard_bits_, threads.threads(),
                            positions, gradients.places);
    ForGroups(groups, threads, [&](const ShardGroup& group) {
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
