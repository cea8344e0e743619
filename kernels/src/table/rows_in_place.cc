#include "table/rows_in_place.h"

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "memory/scratch.h"
#include "table/check_batch.h"
#include "table/read_range.h"

namespace kvtable {

void ShardedTable::ReadInPlace(const void* keys, int64_t n, const Insertion* insertion, Missing missing,
                               const Read& read) {
  static_assert(kMostKeys <= kBlock, "one set of locks");
  if (n == 0) return;
  const BatchTime time = ages_.Begin();
  const std::shared_ptr<const InitialValue> init = initial();
  const size_t words = static_cast<size_t>(value_bytes_ + 7) / 8;
  VisitKeyType(key_type_, [&](auto k) {
    using Key = decltype(k);
    const Key* const typed = static_cast<const Key*>(keys);
    std::array<const char*, kMostKeys> rows;
    std::vector<std::unique_ptr<uint64_t[]>> others;  // values of keys that have no row
    std::vector<const char*> other_of;                // (n) or empty: where a key's is
    int64_t inserted = 0;
    std::vector<int64_t> absent;
    // Keys that were missing are inserted without the locks, and the next round has a row for them, or what stands
    // for one. Others may have gone meanwhile.
    for (bool done = false; !done;) {
      absent.clear();
      const auto visit = [&](int64_t i, const Shard&, const char* row) {
        if (row == nullptr && !other_of.empty()) row = other_of[static_cast<size_t>(i)];
        if (row == nullptr) absent.push_back(i);
        rows[static_cast<size_t>(i)] = row;
        if (i + 1 < n) return;
        if (!absent.empty()) {
          if (insertion != nullptr) return;
          // Zeros are one row for all.
          const size_t each = missing == Missing::kInitial ? words : 0;
          others.emplace_back(new uint64_t[(absent.size() - 1) * each + words]());
          for (size_t a = 0; a < absent.size(); ++a) {
            char* const other = reinterpret_cast<char*>(others.back().get() + a * each);
            if (missing == Missing::kInitial) init->Fill(WidenKey(typed[absent[a]]), other);
            rows[static_cast<size_t>(absent[a])] = other;
          }
        }
        read(rows.data());
        done = true;
      };
      VisitRowBytes(value_bytes_, [&](auto known) {
        constexpr int64_t kBytes = decltype(known)::value;
        ReadRange(
            time, typed, 0, n, [](const Shard&) {},
            [](int64_t, size_t, const Shard& shard, uint32_t row)
                KVTABLE_ALWAYS_INLINE -> const char* { return shard.rows.Row(row); },
            [this](const Shard&, const char* row)
                KVTABLE_ALWAYS_INLINE { PrefetchRow<kBytes>(row, value_bytes_); },
            visit);
      });
      if (done) continue;
      std::vector<Key> missed;
      for (const int64_t i : absent) missed.push_back(typed[i]);
      const int64_t count = static_cast<int64_t>(missed.size());
      std::vector<char> values(missed.size() * static_cast<size_t>(value_bytes_));
      GatherOrInsert(missed.data(), count, RowsOut(values.data()), *insertion, Serial());
      inserted += count;
      others.emplace_back(new uint64_t[missed.size() * words]);
      other_of.resize(static_cast<size_t>(n));
      for (size_t a = 0; a < absent.size(); ++a) {
        char* const other = reinterpret_cast<char*>(others.back().get() + a * words);
        std::memcpy(other, values.data() + a * static_cast<size_t>(value_bytes_),
                    static_cast<size_t>(value_bytes_));
        other_of[static_cast<size_t>(absent[a])] = other;
      }
    }
    if (insertion != nullptr) looked_up_.fetch_add(n - inserted, std::memory_order_relaxed);
  });
}

}  // namespace kvtable
