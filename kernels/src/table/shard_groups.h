// A batch of keys sorted by shard, equal shards in the order of the batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "memory/copy_rows.h"
#include "memory/scratch.h"
#include "table/index.h"
#include "values/elements.h"

namespace kvtable {

// The keys of one shard and their positions in the batch.
struct ShardGroup {
  int shard;
  const uint64_t* keys;
  const uint32_t* positions;
  int64_t count;
  const uint32_t* hints = nullptr;  // the row where each key was seen last, or kNoRow; null: nothing is known

  uint32_t Hint(int64_t i) const { return hints == nullptr ? BucketIndex::kNoRow : hints[i]; }
  // Without its first keys.
  ShardGroup From(int64_t i) const {
    return {shard, keys + i, positions + i, count - i, hints == nullptr ? nullptr : hints + i};
  }
};

// Sorted in three phases: Count for each of `parts`, Place, Sort for each of `parts`.
template <class Key>
class ShardGroups {
 public:
  // Takes keys[subset[i]] for i in [0, n), or keys[i] where `subset` is null. n is below 2^32. `seen_at` is null, or
  // says where a lookup found the row of keys[i] (shard << 32 | row): then groups have hints. `places` is null, or what
  // groups have for the position i.
  ShardGroups(const Key* keys, const uint32_t* subset, int64_t n, int shard_bits, int threads,
              const uint64_t* seen_at = nullptr, const uint32_t* places = nullptr)
      : from_(keys),
        subset_(subset),
        n_(n),
        shard_bits_(shard_bits),
        seen_at_(seen_at),
        places_(places),
        parts_(std::max<int64_t>(1, std::min<int64_t>({threads, n / kKeysPerPart, kMaxParts}))),
        shard_of_(static_cast<size_t>(n)),
        keys_(static_cast<size_t>(n)),
        positions_(static_cast<size_t>(n)),
        hints_(seen_at == nullptr ? 0 : static_cast<size_t>(n)) {}

  int64_t parts() const { return parts_; }

  // How many keys a part has for each shard.
  void Count(int64_t part) {
    const Key* const keys = from_;
    const uint32_t* const subset = subset_;
    const int shard_bits = shard_bits_;
    uint8_t* const shard_of = shard_of_.data();
    std::array<uint32_t, kMaxShards> counts = {};
    const int64_t end = PartBegin(part + 1);
    for (int64_t i = PartBegin(part); i < end; ++i) {
      const int shard = ShardOf(Mix64(WidenKey(keys[subset == nullptr ? i : subset[i]])), shard_bits);
      shard_of[i] = static_cast<uint8_t>(shard);
      ++counts[static_cast<size_t>(shard)];
    }
    next_[static_cast<size_t>(part)] = counts;
  }

  // Where each part's first key of a shard goes.
  void Place() {
    uint32_t total = 0;
    const int shards = 1 << shard_bits_;
    for (int shard = 0; shard < shards; ++shard) {
      const uint32_t begin = total;
      for (int64_t part = 0; part < parts_; ++part) {
        uint32_t& counter = next_[static_cast<size_t>(part)][static_cast<size_t>(shard)];
        const uint32_t count = counter;
        counter = total;
        total += count;
      }
      if (total > begin) {
        groups_[static_cast<size_t>(size_++)] = {shard, keys_.data() + begin, positions_.data() + begin,
                                                 total - begin,
                                                 seen_at_ == nullptr ? nullptr : hints_.data() + begin};
      }
    }
  }

  void Sort(int64_t part) {
    const Key* const keys = from_;
    const uint32_t* const subset = subset_;
    const uint32_t* const places = places_;
    const uint64_t* const seen_at = seen_at_;
    const uint8_t* const shard_of = shard_of_.data();
    uint64_t* const to_keys = keys_.data();
    uint32_t* const to_positions = positions_.data();
    uint32_t* const to_hints = hints_.data();
    std::array<uint32_t, kMaxShards> to = next_[static_cast<size_t>(part)];
    const int64_t end = PartBegin(part + 1);
    for (int64_t i = PartBegin(part); i < end; ++i) {
      const uint32_t position = subset == nullptr ? static_cast<uint32_t>(i) : subset[i];
      const uint8_t shard = shard_of[i];
      const uint32_t slot = to[shard]++;
      // Another core has read what the batch before left there.
      PrefetchToWrite(to_keys + slot + kAhead);
      PrefetchToWrite(to_positions + slot + 2 * kAhead);
      if (seen_at != nullptr) PrefetchToWrite(to_hints + slot + 2 * kAhead);
      to_keys[slot] = WidenKey(keys[position]);
      to_positions[slot] = places == nullptr ? position : places[position];
      if (seen_at != nullptr) {
        const uint64_t at = seen_at[position];
        to_hints[slot] = at >> 32 == shard ? static_cast<uint32_t>(at) : BucketIndex::kNoRow;
      }
    }
  }

  // Groups that are not empty, once they are placed.
  int size() const { return size_; }
  const ShardGroup& operator[](int64_t i) const { return groups_[static_cast<size_t>(i)]; }

 private:
  static constexpr int64_t kKeysPerPart = 4096;
  static constexpr int64_t kMaxParts = 16;
  static constexpr size_t kAhead = 16;

  int64_t PartBegin(int64_t part) const { return n_ * part / parts_; }

  const Key* const from_;
  const uint32_t* const subset_;
  const int64_t n_;
  const int shard_bits_;
  const uint64_t* const seen_at_;
  const uint32_t* const places_;
  const int64_t parts_;
  Scratch<uint8_t> shard_of_;
  Scratch<uint64_t> keys_;
  Scratch<uint32_t> positions_;
  Scratch<uint32_t> hints_;
  std::array<std::array<uint32_t, kMaxShards>, kMaxParts>
      next_;  // of each part and shard: how many, then where to
  std::array<ShardGroup, kMaxShards> groups_;
  int size_ = 0;
};

}  // namespace kvtable
