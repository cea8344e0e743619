#include "table/parts_reader.h"

#include <array>
#include <optional>
#include <type_traits>

#include "kvtable/part_of.h"
#include "lookups/owners.h"
#include "table/read_range.h"

namespace kvtable {
namespace {

constexpr size_t kMostParts = 16;  // a set of locks each

}  // namespace

PartsReader::PartsReader(const TableParts& parts) {
  if (parts.size() > kMostParts) return;
  std::vector<ShardedTable*> tables;
  for (Table* const part : parts) {
    auto* const table = dynamic_cast<ShardedTable*>(part);
    if (table == nullptr || table->ages_.expiry().ages() || table->spill_ != nullptr) return;
    if (!tables.empty() && table->shard_bits_ != tables[0]->shard_bits_) return;
    tables.push_back(table);
  }
  for (ShardedTable* const table : tables) {
    for (const auto& shard : table->shards_) shards_.push_back(shard.get());
  }
  tables_ = std::move(tables);
}

int64_t PartsReader::Read(const void* keys, int64_t n, const RowsOut& out, bool counts,
                          uint32_t* left) const {
  int64_t num_left = 0;
  VisitSignedKeyType(tables_[0]->key_type_, [&](auto k) {
    using Key = decltype(k);
    VisitRowCopy(out, tables_[0]->value_type_, tables_[0]->dim_, [&](const auto copy) {
      num_left = ReadKeys(static_cast<const Key*>(keys), n, out, copy, counts, left);
    });
  });
  return num_left;
}

template <class Key, class RowCopy>
int64_t PartsReader::ReadKeys(const Key* keys, int64_t n, const RowsOut& out, const RowCopy copy, bool counts,
                              uint32_t* left) const {
  // As tables have them: the sign counts for the part alone.
  using TableKey = std::conditional_t<sizeof(Key) == 4, int32_t, uint64_t>;
  const TableKey* const table_keys = reinterpret_cast<const TableKey*>(keys);
  const int bits = tables_[0]->shard_bits_;
  const size_t in_part = (size_t{1} << bits) - 1;
  const PartOf<Key> part_of(static_cast<int64_t>(tables_.size()));
  std::array<uint64_t, kBlock> hashes;
  std::array<uint16_t, kBlock> numbers;
  std::array<uint32_t, kBlock> picked;
  const SeveralTables places{shards_.data(), numbers.data(), hashes.data()};
  std::array<int64_t, kMostParts> found{};
  int64_t num_left = 0;
  const auto leave = [&](int64_t i) { left[num_left++] = static_cast<uint32_t>(i); };
  const auto locate = [&](int64_t i, size_t number, const Shard& shard, uint32_t row)
                          KVTABLE_ALWAYS_INLINE -> const char* {
    if (out.positions != nullptr) out.positions[out.PlaceOf(i)] = uint64_t{number & in_part} << 32 | row;
    return shard.rows.Row(row);
  };
  const auto prefetch = [copy](const Shard&, const char* row) KVTABLE_ALWAYS_INLINE { copy.Prefetch(row); };
  const WriteRequests requests = BestWriteRequests();
  const int64_t ask_to = AskTo(out, copy.out_bytes(), n);
  const auto visit = [&](int64_t i, const Shard&, const char* row) {
    if (i + kOutputAhead < ask_to) {
      copy.PrefetchOut(out.rows + (i + kOutputAhead) * copy.out_bytes(), requests.to_be_written);
    }
    if (row == nullptr) return leave(i);
    copy.Copy(out.rows + out.PlaceOf(i) * copy.out_bytes(), row);
  };
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    const int64_t left_before = num_left;
    PrefetchKeys(keys + begin + count, keys + n);
    std::array<uint64_t, kMostParts> touched{};
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = Mix64(WidenKey(table_keys[begin + i]));
      const size_t part = static_cast<size_t>(part_of(keys[begin + i]));
      const int shard = ShardOf(hash, bits);
      hashes[static_cast<size_t>(i)] = hash;
      numbers[static_cast<size_t>(i)] = static_cast<uint16_t>(part << bits | static_cast<size_t>(shard));
      touched[part] |= uint64_t{1} << shard;
      ++found[part];
    }
    std::array<std::optional<BlockHold>, kMostParts> holds;
    bool has_all = true;
    for (size_t part = 0; part < tables_.size(); ++part) {
      if (touched[part] == 0) continue;
      holds[part].emplace(&tables_[part]->seats_, tables_[part]->shards_, touched[part], false);
      has_all = has_all && holds[part]->shards() == touched[part];
    }
    if (__builtin_expect(has_all, 1)) {
      ShardedTable::ReadHeld({}, ConsecutiveKeys{begin}, count, places, locate, prefetch, visit);
    } else {
      int64_t held = 0;
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t number = numbers[static_cast<size_t>(i)];
        if ((holds[number >> bits]->shards() >> (number & in_part) & 1) == 0) {
          leave(begin + i);
          continue;
        }
        picked[static_cast<size_t>(held)] = static_cast<uint32_t>(begin + i);
        numbers[static_cast<size_t>(held)] = number;
        hashes[static_cast<size_t>(held++)] = hashes[static_cast<size_t>(i)];
      }
      ShardedTable::ReadHeld({}, ListedKeys{0, picked.data()}, held, places, locate, prefetch, visit);
    }
    if (2 * (num_left - left_before) > count) {  // what comes will hardly fare better
      for (int64_t i = begin + count; i < n; ++i) {
        leave(i);
        ++found[static_cast<size_t>(part_of(keys[i]))];
      }
      break;
    }
  }
  if (counts) {
    for (int64_t l = 0; l < num_left; ++l) --found[static_cast<size_t>(part_of(keys[left[l]]))];
    for (size_t part = 0; part < tables_.size(); ++part) tables_[part]->CountLookedUp(found[part]);
  }
  return num_left;
}

}  // namespace kvtable
