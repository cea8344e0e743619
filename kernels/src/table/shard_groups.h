// A batch of keys sorted by shard, equal shards in the order of the batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "memory/scratch.h"
#include "table/index.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

class ShardGroups {
 public:
  // The keys of one shard and their positions in the batch. `hints` may be null: the row where each key was seen
  // last, or kNoRow.
  struct Group {
    int shard;
    const uint64_t* keys;
    const uint32_t* positions;
    int64_t count;
    const uint32_t* hints = nullptr;
  };

  // Takes keys[subset[i]] for i in [0, n), or keys[i] where `subset` is null. n is below 2^32. `seen_at` is null, or
  // says where a lookup found the row of keys[i] (shard << 32 | row): then groups have hints. `places` is null, or what
  // groups have for the position i.
  template <class Key>
  ShardGroups(const Key* keys, const uint32_t* subset, int64_t n, int shard_bits, ParallelFor& threads,
              const uint64_t* seen_at = nullptr, const uint32_t* places = nullptr)
      : keys_(static_cast<size_t>(n)),
        positions_(static_cast<size_t>(n)),
        hints_(seen_at == nullptr ? 0 : static_cast<size_t>(n)) {
    Scratch<uint8_t> shard_of(static_cast<size_t>(n));
    const int64_t parts =
        std::max<int64_t>(1, std::min<int64_t>({threads.threads(), n / kKeysPerPart, kMaxParts}));
    const auto part_begin = [n, parts](int64_t part) { return n * part / parts; };

    // How many keys each part has for each shard, then where each part's first one goes.
    std::array<std::array<uint32_t, kMaxShards>, kMaxParts> next;
    uint8_t* const shards_of = shard_of.data();
    RunTasks(threads, parts, [=, &next](int64_t part) {
      std::array<uint32_t, kMaxShards> counts = {};
      const int64_t end = part_begin(part + 1);
      for (int64_t i = part_begin(part); i < end; ++i) {
        const int shard = ShardOf(Mix64(WidenKey(keys[subset == nullptr ? i : subset[i]])), shard_bits);
        shards_of[i] = static_cast<uint8_t>(shard);
        ++counts[static_cast<size_t>(shard)];
      }
      next[static_cast<size_t>(part)] = counts;
    });
    uint32_t total = 0;
    const int shards = 1 << shard_bits;
    for (int shard = 0; shard < shards; ++shard) {
      const uint32_t begin = total;
      for (int64_t part = 0; part < parts; ++part) {
        uint32_t& counter = next[static_cast<size_t>(part)][static_cast<size_t>(shard)];
        const uint32_t count = counter;
        counter = total;
        total += count;
      }
      if (total > begin) {
        groups_[static_cast<size_t>(size_++)] = {shard, keys_.data() + begin, positions_.data() + begin,
                                                 total - begin,
                                                 seen_at == nullptr ? nullptr : hints_.data() + begin};
      }
    }
    uint64_t* const to_keys = keys_.data();
    uint32_t* const to_positions = positions_.data();
    uint32_t* const to_hints = hints_.data();
    RunTasks(threads, parts, [=, &next](int64_t part) {
      std::array<uint32_t, kMaxShards> to = next[static_cast<size_t>(part)];
      const int64_t end = part_begin(part + 1);
      for (int64_t i = part_begin(part); i < end; ++i) {
        const uint32_t position = subset == nullptr ? static_cast<uint32_t>(i) : subset[i];
        const uint8_t shard = shards_of[i];
        const uint32_t slot = to[shard]++;
        to_keys[slot] = WidenKey(keys[position]);
        to_positions[slot] = places == nullptr ? position : places[position];
        if (seen_at != nullptr) {
          const uint64_t at = seen_at[position];
          to_hints[slot] = at >> 32 == shard ? static_cast<uint32_t>(at) : BucketIndex::kNoRow;
        }
      }
    });
  }

  // Groups that are not empty.
  int size() const { return size_; }
  const Group& operator[](int64_t i) const { return groups_[static_cast<size_t>(i)]; }

 private:
  static constexpr int64_t kKeysPerPart = 16384;
  static constexpr int64_t kMaxParts = 16;

  Scratch<uint64_t> keys_;
  Scratch<uint32_t> positions_;
  Scratch<uint32_t> hints_;
  std::array<Group, kMaxShards> groups_;
  int size_ = 0;
};

}  // namespace kvtable
