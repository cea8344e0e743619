// The parts of a variable, looked up in one pass, give what one table with all keys gives.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/optimizer.h"
#include "kvtable/part_of.h"
#include "kvtable/split_by_part.h"
#include "kvtable/table.h"
#include "pool.h"
#include "spilled.h"
#include "table/sharded_table.h"

namespace kvtable {
namespace {

template <class Key>
KeyType TypeOf() {
  if constexpr (sizeof(Key) == 4) return KeyType::kInt32;
  return std::is_signed_v<Key> ? KeyType::kInt64 : KeyType::kUint64;
}

// Half of the keys have rows; the others get their initial values, and with `insert` rows. The last part may keep most of
// its rows in a file.
template <class Key>
void PartsAreAsOneTable(int64_t num_parts, int64_t dim, bool insert, bool spilled = false) {
  constexpr int64_t kCount = 4000;
  TableOptions options;
  options.key_type = TypeOf<Key>();
  options.dim = dim;
  options.initializer.kind = Initializer::Kind::kUniform;
  options.initializer.a = -1;
  options.initializer.b = 1;
  options.initializer.seed = 7;
  const auto whole = Table::Create(options);
  std::vector<std::unique_ptr<Table>> tables;
  TableParts parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    tables.push_back(Table::Create(spilled && p == num_parts - 1 ? Spilled(options, dim * 4) : options));
    parts.push_back(tables.back().get());
  }
  const PartOf<Key> part_of(num_parts);
  const auto key_of = [](int64_t i) { return static_cast<Key>((i - kCount / 2) * 1000003); };
  for (int64_t i = 0; i < kCount; i += 2) {
    const Key key = key_of(i);
    const std::vector<float> row(static_cast<size_t>(dim), static_cast<float>(i));
    whole->Upsert(&key, 1, row.data(), {1, 1}, Serial());
    parts[static_cast<size_t>(part_of(key))]->Upsert(&key, 1, row.data(), {1, 1}, Serial());
  }
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{30000}}) {
    std::vector<Key> keys;
    for (int64_t i = 0; i < n; ++i) {
      // Few are missing, so that the pass goes on to the end.
      const uint64_t random = Mix64(static_cast<uint64_t>(i + n));
      const int64_t row = static_cast<int64_t>(random % kCount);
      keys.push_back(key_of(random >> 40 & 7 ? row / 2 * 2 : row));
    }
    std::vector<float> expected(static_cast<size_t>(n * dim), -5.0f);
    std::vector<float> rows(static_cast<size_t>(n * dim), -6.0f);
    std::vector<uint64_t> positions(static_cast<size_t>(n));
    MissingKeys missing;
    missing.insert = insert;
    missing.missing = Missing::kInitial;
    missing.stamp = {1, 3};
    const auto counted = [&] {
      LookupCounts sum{0, 0, 0};
      for (const Table* part : parts) {
        sum.keys += part->lookup_counts().keys;
        sum.born += part->lookup_counts().born;
      }
      return sum;
    };
    const LookupCounts before = counted();
    const int64_t rows_before = whole->Size();
    LookUpOne(whole.get(), keys.data(), n, RowsOut(expected.data()), missing, Serial());
    LookUpParts({{parts, keys.data(), n, RowsOut(rows.data(), positions.data()), missing}}, Pool());
    CHECK(rows == expected);
    for (int64_t i = 0; i < n; ++i) {
      const Key key = keys[static_cast<size_t>(i)];
      bool there = false;
      Table* const part = parts[static_cast<size_t>(part_of(key))];
      part->Contains(&key, 1, &there, Serial());
      CHECK(there == (positions[static_cast<size_t>(i)] != kNoPosition) && (there || !insert));
      if (!there) continue;
      Key found;
      part->KeysAt(&positions[static_cast<size_t>(i)], 1, &found);
      CHECK(found == key);
    }
    int64_t size = 0;
    for (const Table* part : parts) size += part->Size();
    CHECK(size == whole->Size());
    const LookupCounts after = counted();
    CHECK(after.keys - before.keys == (insert ? n : 0));
    CHECK(after.born - before.born == whole->Size() - rows_before);
  }
}

// A shard of one part is being written for long: a lookup of all parts gives everything once it is free, and those of
// other shards don't wait.
void AWrittenPartIsReadWhenItIsFree() {
  constexpr int64_t kCount = 3000;
  TableOptions options;
  options.dim = 2;
  options.shards = 8;
  ShardedTable first(options), second(options);
  const TableParts parts = {&first, &second};
  const std::vector<float> ones(kCount * 2, 1.0f);
  std::vector<int64_t> all, others;
  for (int64_t key = 0; key < kCount; ++key) {
    all.push_back(key);
    parts[static_cast<size_t>(key % 2)]->Upsert(&key, 1, ones.data(), {1, 5}, Serial());
    if (key % 2 == 0 || ShardOf(Mix64(static_cast<uint64_t>(key)), 3) != 0) others.push_back(key);
  }
  int64_t slow = 1;
  while (ShardOf(Mix64(static_cast<uint64_t>(slow)), 3) != 0) slow += 2;
  second.Upsert(&slow, 1, ones.data(), {1, 1}, Serial());
  std::atomic<bool> stands{false};
  std::atomic<bool> go_on{false};
  second.OnEvicted([&](uint64_t) {
    stands = true;
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::thread writer([&] {
    RowTest old;
    old.written_before = 2;
    PassCursor cursor;
    CHECK(second.EvictSlice(old, &cursor, 1 << 20, Serial()) == 1);
  });
  while (!stands) std::this_thread::yield();
  MissingKeys missing;
  std::vector<float> rows(kCount * 2), waited(kCount * 2);
  std::thread reader(
      [&] { LookUpParts({{parts, all.data(), kCount, RowsOut(waited.data()), missing}}, Serial()); });
  while (second.LockWaits() == 0) std::this_thread::yield();
  const int64_t n = static_cast<int64_t>(others.size());
  LookUpParts({{parts, others.data(), n, RowsOut(rows.data()), missing}}, Serial());
  for (int64_t i = 0; i < 2 * n; ++i) CHECK(rows[static_cast<size_t>(i)] == 1.0f);
  CHECK(first.LockWaits() == 0 && second.LockWaits() == 1);
  go_on = true;
  writer.join();
  reader.join();
  for (int64_t key = 0; key < kCount; ++key) {
    CHECK(waited[static_cast<size_t>(2 * key)] == (key == slow ? 0.0f : 1.0f));
  }
}

template <class Key>
void KeysAreSplitWithTheirPlaces(int64_t parts) {
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{30000}}) {
    std::vector<Key> keys;
    std::vector<uint64_t> positions;
    for (int64_t i = 0; i < n; ++i) {
      keys.push_back(static_cast<Key>(Mix64(static_cast<uint64_t>(i)) % 5000 - 2500));
      positions.push_back(static_cast<uint64_t>(7 * i));
    }
    const SplitByPart split(TypeOf<Key>(), keys.data(), n, parts, Pool());
    std::vector<std::vector<Key>> part_keys;
    std::vector<std::vector<uint64_t>> part_positions;
    std::vector<std::vector<uint32_t>> places;
    std::vector<SplitByPart::Share> shares;
    for (int64_t p = 0; p < parts; ++p) {
      part_keys.emplace_back(split.count(p));
      part_positions.emplace_back(split.count(p));
      places.emplace_back(split.count(p));
      shares.push_back(
          {part_keys.back().data(), nullptr, part_positions.back().data(), places.back().data()});
    }
    split.Write(nullptr, 0, positions.data(), shares, Pool());
    const PartOf<Key> part_of(parts);
    std::vector<size_t> next(static_cast<size_t>(parts));
    for (size_t i = 0; i < keys.size(); ++i) {
      const size_t p = static_cast<size_t>(part_of(keys[i]));
      const size_t at = next[p]++;
      CHECK(part_keys[p][at] == keys[i] && part_positions[p][at] == positions[i] && places[p][at] == i);
    }
    for (size_t p = 0; p < next.size(); ++p) CHECK(next[p] == places[p].size());
  }
}

// A step with gradients from anywhere in an array is that with copies of them, to the bit.
void GradientsAreTakenFromTheirPlaces(TableOptions options, bool widened = false) {
  constexpr int64_t kDim = 6;
  constexpr uint32_t kGradients = 3000;
  options.dim = kDim;
  options.initializer.kind = Initializer::Kind::kUniform;
  options.initializer.b = 1;
  const auto copied = Table::Create(options), placed = Table::Create(options);
  for (Table* const table : {copied.get(), placed.get()}) {
    table->EnsureSlots({{"m", kDim}, {"v", kDim}}, Serial());
  }
  const SlotColumns slots({1, 2}, copied->schema().generation);
  Update update = MakeUpdate("adam", {{"learning_rate", 0.5}, {"beta_1_power", 0.9}, {"beta_2_power", 0.99}});
  update.skip_nonfinite = true;
  update.float32_gradients = widened;
  std::vector<float> gradients;
  for (uint32_t i = 0; i < kGradients * kDim; ++i) {
    gradients.push_back(static_cast<float>(Mix64(i) % 1000) / 997 - 0.5f);
  }
  gradients[5 * kDim] = NAN;
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{2000}, int64_t{2000}}) {
    std::vector<int64_t> keys;
    std::vector<uint32_t> places;
    std::vector<float> copies;
    for (uint64_t i = 0; i < static_cast<uint64_t>(n); ++i) {
      keys.push_back(static_cast<int64_t>(Mix64(i) % 700));  // most come several times
      places.push_back(static_cast<uint32_t>(Mix64(i + 1) % kGradients));
      const float* const row = &gradients[places.back() * kDim];
      copies.insert(copies.end(), row, row + kDim);
    }
    std::vector<uint64_t> positions(keys.size());
    copied->Locate(keys.data(), n, positions.data(), Pool());
    const ApplyCounts expected =
        copied->Apply(keys.data(), positions.data(), n, copies.data(), update, slots, {1, 2}, Pool());
    placed->Locate(keys.data(), n, positions.data(), Pool());
    const ApplyCounts got = placed->Apply(keys.data(), positions.data(), n, {gradients.data(), places.data()},
                                          update, slots, {1, 2}, Pool());
    CHECK(expected.updated == got.updated && expected.skipped == got.skipped);
  }
  CHECK(copied->Size() == placed->Size() && copied->SkippedUpdates() == placed->SkippedUpdates());
  CHECK(copied->SkippedUpdates() > 0);
  std::vector<int64_t> all(700);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  for (int column = 0; column <= 2; ++column) {
    std::vector<float> expected(all.size() * kDim), got(all.size() * kDim);
    copied->GatherColumns(all.data(), 700, {{column, expected.data(), kDim}}, nullptr, Serial());
    placed->GatherColumns(all.data(), 700, {{column, got.data(), kDim}}, nullptr, Serial());
    CHECK(std::memcmp(expected.data(), got.data(), got.size() * sizeof(float)) == 0);
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  using namespace kvtable;
  for (const bool insert : {false, true}) {
    PartsAreAsOneTable<int64_t>(5, 16, insert);
    PartsAreAsOneTable<int32_t>(2, 3, insert);
    PartsAreAsOneTable<uint64_t>(3, 1, insert);
    PartsAreAsOneTable<int64_t>(16, 4, insert);
    PartsAreAsOneTable<int64_t>(2, 4, insert, true);
    PartsAreAsOneTable<int64_t>(17, 4, insert);  // more than are read in one pass
  }
  AWrittenPartIsReadWhenItIsFree();
  KeysAreSplitWithTheirPlaces<int64_t>(5);
  KeysAreSplitWithTheirPlaces<int32_t>(1);
  KeysAreSplitWithTheirPlaces<uint64_t>(64);
  TableOptions options;
  GradientsAreTakenFromTheirPlaces(options);
  GradientsAreTakenFromTheirPlaces(Spilled(options, 6 * 3 * 4, 16));
  options.max_capacity = 500;
  GradientsAreTakenFromTheirPlaces(options);
  TableOptions narrow;
  narrow.value_type = ValueType::kBFloat16;
  GradientsAreTakenFromTheirPlaces(narrow, true);
  return 0;
}
