#include "table/rows_in_place.h"

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "table/block_hold.h"
#include "table/find_rows.h"
#include "table/hash_keys.h"
#include "table/sharded_table.h"
#include "values/elements.h"

namespace kvtable {
namespace {

// Some rows of a table, each aligned for its elements.
struct OtherRows {
  OtherRows(size_t count, size_t row_words) : words(row_words), memory(count * row_words) {}
  char* Row(size_t i) { return reinterpret_cast<char*>(memory.data() + i * words); }
  size_t words;
  std::vector<uint64_t> memory;
};

}  // namespace

bool ShardedTable::ReadInPlace(const void* keys, int64_t n, const Insertion* insertion, Missing missing,
                               const Read& read) {
  if (spill_ != nullptr || ages_.Begin().expired_before != 0) return false;
  static_assert(kMostKeys <= kBlock);
  if (n == 0) return true;
  static const HashKeys hash_keys = BestHashKeys();
  const std::shared_ptr<const InitialValue> init = initial();
  const size_t words = static_cast<size_t>(value_bytes_ + 7) / 8;
  std::array<uint64_t, kMostKeys> wide;
  std::array<uint64_t, kMostKeys> hashes;
  std::array<uint32_t, kMostKeys> numbers;
  std::array<const char*, kMostKeys> rows;
  const size_t count = static_cast<size_t>(n);
  VisitKeyType(key_type_, [&](auto k) {
    const auto* const typed = static_cast<const decltype(k)*>(keys);
    for (size_t i = 0; i < count; ++i) wide[i] = WidenKey(typed[i]);
  });
  const uint64_t touched = hash_keys(wide.data(), n, shard_bits_, hashes.data());
  // Keys without a row, and where what stands for it is. Those that are inserted are so without the locks; others may
  // have gone meanwhile.
  std::vector<uint32_t> absent;
  std::vector<OtherRows> others;
  std::vector<const char*> other_of;  // (n), or empty
  int64_t inserted = 0;
  for (;;) {
    absent.clear();
    {
      const BlockHold hold(&seats_, shards_, touched, false);
      if (hold.shards() != touched) {  // a writer has one: copies can be had shard by shard
        looked_up_.fetch_sub(inserted, std::memory_order_relaxed);  // whoever copies counts all keys
        return false;
      }
      const OneTable places{shards_.data(), shard_bits_, hashes.data()};
      FindRows(places, n, numbers.data());
      for (size_t i = 0; i < count; ++i) {
        if (__builtin_expect(numbers[i] == BucketIndex::kNoRow, 0)) {
          rows[i] = other_of.empty() ? nullptr : other_of[i];
          if (rows[i] == nullptr) absent.push_back(static_cast<uint32_t>(i));
          continue;
        }
        rows[i] = places.shard(static_cast<int64_t>(i)).rows.Row(numbers[i]);
      }
      if (!absent.empty() && insertion == nullptr) {
        others.emplace_back(missing == Missing::kInitial ? absent.size() : 1, words);
        for (size_t a = 0; a < absent.size(); ++a) {
          char* const other = others.back().Row(missing == Missing::kInitial ? a : 0);
          if (missing == Missing::kInitial) init->Fill(wide[absent[a]], other);
          rows[absent[a]] = other;
        }
        absent.clear();
      }
      if (absent.empty()) {
        read(rows.data());
        break;
      }
    }
    const size_t new_keys = absent.size();
    std::vector<char> values(new_keys * static_cast<size_t>(value_bytes_));
    VisitKeyType(key_type_, [&](auto k) {
      using Key = decltype(k);
      std::vector<Key> missed;
      for (const uint32_t i : absent) missed.push_back(static_cast<const Key*>(keys)[i]);
      GatherOrInsert(missed.data(), static_cast<int64_t>(new_keys), RowsOut(values.data()), *insertion,
                     Serial());
    });
    inserted += static_cast<int64_t>(new_keys);
    others.emplace_back(new_keys, words);
    other_of.resize(count);
    for (size_t a = 0; a < new_keys; ++a) {
      char* const other = others.back().Row(a);
      std::memcpy(other, values.data() + a * static_cast<size_t>(value_bytes_),
                  static_cast<size_t>(value_bytes_));
      other_of[absent[a]] = other;
    }
  }
  if (insertion != nullptr) looked_up_.fetch_add(n - inserted, std::memory_order_relaxed);
  return true;
}

}  // namespace kvtable
