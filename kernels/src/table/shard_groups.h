// A batch of keys sorted by shard, equal shards in the order of the batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "memory/scratch.h"
#include "threads/run_tasks.h"
#include "values/elements.h"

namespace kvtable {

class ShardGroups {
 public:
  // The keys of one shard and their positions in the batch.
  struct Group {
    int shard;
    const uint64_t* keys;
    const uint32_t* positions;
    int64_t count;
  };

  // Takes keys[subset[i]] for i in [0, n), or keys[i] where `subset` is null. n is below 2^32.
  template <class Key>
  ShardGroups(const Key* keys, const uint32_t* subset, int64_t n, int shard_bits, ParallelFor& threads)
      : keys_(static_cast<size_t>(n)), positions_(static_cast<size_t>(n)) {
    Scratch<uint8_t> shard_of(static_cast<size_t>(n));
    const int64_t parts =
        std::max<int64_t>(1, std::min<int64_t>({threads.threads(), n / kKeysPerPart, kMaxParts}));
    const auto part_begin = [&](int64_t part) { return n * part / parts; };

    // How many keys each part has for each shard, then where each part's first one goes.
    std::array<std::array<uint32_t, kMaxShards>, kMaxParts> next;
    RunTasks(threads, parts, [&](int64_t part) {
      std::array<uint32_t, kMaxShards>& counts = next[static_cast<size_t>(part)];
      counts.fill(0);
      for (int64_t i = part_begin(part); i < part_begin(part + 1); ++i) {
        const int shard = ShardOf(Mix64(WidenKey(keys[subset == nullptr ? i : subset[i]])), shard_bits);
        shard_of[static_cast<size_t>(i)] = static_cast<uint8_t>(shard);
        ++counts[static_cast<size_t>(shard)];
      }
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
                                                 total - begin};
      }
    }
    RunTasks(threads, parts, [&](int64_t part) {
      std::array<uint32_t, kMaxShards>& to = next[static_cast<size_t>(part)];
      for (int64_t i = part_begin(part); i < part_begin(part + 1); ++i) {
        const uint32_t position = subset == nullptr ? static_cast<uint32_t>(i) : subset[i];
        const uint32_t slot = to[shard_of[static_cast<size_t>(i)]]++;
        keys_[slot] = WidenKey(keys[position]);
        positions_[slot] = position;
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
  std::array<Group, kMaxShards> groups_;
  int size_ = 0;
};

}  // namespace kvtable
