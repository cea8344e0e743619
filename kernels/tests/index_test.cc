// The index against a map, with as many removals as insertions: keys that hash at random in tables so small that buckets
// overflow all the time, and keys made to meet in one bucket, beyond those within reach.
#include "table/index.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/hash.h"
#include "check.h"

namespace kvtable {
namespace {

std::shared_ptr<EqualSlots> Slots(bool huge_pages, int owners = 1) {
  return std::make_shared<EqualSlots>(owners, huge_pages, "a test");
}

using HashOfKey = std::function<uint64_t(uint64_t)>;

// Rows as a RowStore gives them: the lowest that is free.
struct Model {
  std::unordered_map<uint64_t, uint32_t> rows;  // by hash
  std::vector<uint32_t> free;

  uint32_t Next() const { return free.empty() ? static_cast<uint32_t>(rows.size()) : free.back(); }
  void Add(uint64_t hash) {
    const uint32_t row = Next();
    if (!free.empty()) free.pop_back();
    rows[hash] = row;
  }
  void Remove(uint64_t hash) {
    free.push_back(rows.at(hash));
    rows.erase(hash);
  }
};

// `keys`: how many there are to choose among. Returns the most far keys that there were.
size_t AgreesWithAMap(uint64_t keys, int rounds, uint64_t seed, const HashOfKey& hash_of,
                      BucketIndex* index) {
  Model model;
  size_t most_far = 0;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t random = Mix64(seed + static_cast<uint64_t>(round));
    const uint64_t hash = hash_of(random % keys);
    const auto it = model.rows.find(hash);
    const uint32_t there = it == model.rows.end() ? BucketIndex::kNoRow : it->second;
    CHECK(index->Find(hash) == there);
    if (random >> 63 != 0) {
      CHECK(index->Erase(hash) == there);
      if (there != BucketIndex::kNoRow) model.Remove(hash);
    } else if (there == BucketIndex::kNoRow) {
      index->PrepareInsert(model.Next());
      index->Insert(hash, model.Next());
      model.Add(hash);
    }
    CHECK(index->size() == model.rows.size());
    if (index->far_keys() > most_far) most_far = index->far_keys();
  }
  for (const auto& [hash, row] : model.rows) CHECK(index->Find(hash) == row);
  for (uint64_t key = 0; key < keys; ++key) {
    if (model.rows.count(hash_of(key)) == 0) CHECK(index->Find(hash_of(key)) == BucketIndex::kNoRow);
  }
  while (!model.rows.empty()) {
    const auto [hash, row] = *model.rows.begin();
    CHECK(index->Erase(hash) == row);
    model.Remove(hash);
  }
  CHECK(index->size() == 0 && index->far_keys() == 0);
  for (uint64_t key = 0; key < keys; ++key) CHECK(index->Find(hash_of(key)) == BucketIndex::kNoRow);
  return most_far;
}

size_t AgreesWithAMap(uint64_t keys, int rounds, uint64_t seed, const HashOfKey& hash_of) {
  BucketIndex index(Slots(true), 0);
  return AgreesWithAMap(keys, rounds, seed, hash_of, &index);
}

void EmptyIndexFindsNothing() {
  BucketIndex index(Slots(false), 0);
  CHECK(index.Find(Mix64(0)) == BucketIndex::kNoRow);
  CHECK(index.Erase(Mix64(0)) == BucketIndex::kNoRow);
  CHECK(index.bytes() == 0);
}

// Hashes that have the lower half in common, or nearly so, have their homes side by side: at the end of the buckets, from
// where the search goes on at their beginning, in the middle, and at the beginning.
void KeysThatMeetAreFound() {
  for (const uint64_t lower : {uint64_t{UINT32_MAX}, uint64_t{0x80000000}, uint64_t{0}}) {
    const auto one_home = [lower](uint64_t key) { return key << 32 | lower; };
    CHECK(AgreesWithAMap(3'000, 60'000, lower, one_home) > 1'000);
    const auto some_homes = [lower](uint64_t key) {
      return (key / 64) << 32 | static_cast<uint32_t>(lower + (key % 64) * 4'000'000);
    };
    AgreesWithAMap(3'000, 60'000, lower, some_homes);
  }
}

// A row is found whatever the number of buckets is: just below, at and above each power of two, full and grown.
void RowsComeBackAtEverySize() {
  for (size_t keys = 1; keys < 5'000; keys += keys < 400 ? 1 : 97) {
    BucketIndex index(Slots(false), 0);
    index.Reserve(keys);
    for (uint64_t key = 0; key < keys; ++key) {
      index.PrepareInsert(static_cast<uint32_t>(key));
      index.Insert(Mix64(key), static_cast<uint32_t>(key));
    }
    for (int grown = 0; grown < 2; ++grown) {
      for (uint64_t key = 0; key < keys; ++key) CHECK(index.Find(Mix64(key)) == key);
      for (uint64_t key = keys; key < keys + 100; ++key) CHECK(index.Find(Mix64(key)) == BucketIndex::kNoRow);
      index.Reserve(2 * keys + 1);
    }
  }
}

void RowsOfManyBitsMakeRoomForThemselves() {
  BucketIndex index(Slots(false), 0);
  for (const uint32_t row : {0U, 255U, 256U, 100'000U, 3'000'000U}) {
    index.PrepareInsert(row);
    index.Insert(Mix64(row), row);
  }
  for (const uint32_t row : {0U, 255U, 256U, 100'000U, 3'000'000U}) CHECK(index.Find(Mix64(row)) == row);
}

void GrowthStaysWithinItsLoad() {
  BucketIndex index(Slots(true), 0);
  for (uint32_t key = 0; key < 1'000'000; ++key) {
    index.PrepareInsert(key);
    index.Insert(Mix64(key), key);
    const double per_key = static_cast<double>(index.bytes()) / static_cast<double>(index.size());
    CHECK(key < 1'000 || per_key >= 11.0);
    CHECK(key < 300'000 || per_key <= 19.0);
  }
  CHECK(index.MaxProbeLength() <= 17);
  CHECK(index.far_keys() < 200);
}

// Indexes of shards, which grow together: as soon as each has one key more, all are of one size, side by side.
void ShardsGrowTogether() {
  constexpr int kShards = 16;
  const auto slots = Slots(true, kShards);
  std::vector<std::unique_ptr<BucketIndex>> all;
  for (int s = 0; s < kShards; ++s) all.push_back(std::make_unique<BucketIndex>(slots, s));
  std::vector<uint32_t> rows(kShards, 0);
  for (uint64_t key = 0; key < 1'500'000; ++key) {
    const auto s = static_cast<size_t>(Mix64(key) >> 60);
    all[s]->PrepareInsert(rows[s]);
    all[s]->Insert(Mix64(key), rows[s]++);
    if (key < 300'000 || key % 1'000 != 0) continue;
    size_t bytes = slots->idle_bytes();
    for (const auto& one : all) bytes += one->bytes();
    const double per_key = static_cast<double>(bytes) / static_cast<double>(key);
    CHECK(per_key >= 12.0 && per_key <= 16.5);
  }
  std::vector<uint32_t> next(kShards, 0);
  for (uint64_t key = 0; key < 1'500'000; ++key) {
    const auto s = static_cast<size_t>(Mix64(key) >> 60);
    CHECK(all[s]->Find(Mix64(key)) == next[s]++);
  }
  for (const auto& one : all) one->Clear();
  CHECK(slots->idle_bytes() == 0);
}

// Keys that come and go for long, in an index that does not grow: buckets that count no more who passes become no more.
void AbsentKeysAreFewBucketsAwayAfterLongUse() {
  BucketIndex index(Slots(false), 0);
  const uint32_t keys = 20'000;
  index.Reserve(keys);
  for (uint32_t key = 0; key < keys; ++key) {
    index.PrepareInsert(key);
    index.Insert(Mix64(key), key);
  }
  const uint64_t rounds = 40 * keys;
  for (uint64_t round = 0; round < rounds; ++round) {
    const uint32_t row = index.Erase(Mix64(round));
    CHECK(row == round % keys);
    index.PrepareInsert(row);
    index.Insert(Mix64(round + keys), row);
  }
  for (uint64_t key = rounds; key < rounds + keys; ++key) CHECK(index.Find(Mix64(key)) == key % keys);
  int64_t steps = 0;
  for (uint64_t key = 0; key < keys; ++key) {
    const BucketRef home = index.Home(Mix64(key));
    for (BucketRef at = home; at; at = index.Next(at, home)) ++steps;
  }
  CHECK(steps < 3 * static_cast<int64_t>(keys));
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::EmptyIndexFindsNothing();
  for (uint64_t seed = 0; seed < 20; ++seed) kvtable::AgreesWithAMap(40, 20000, seed << 40, kvtable::Mix64);
  kvtable::AgreesWithAMap(100000, 300000, 99, kvtable::Mix64);
  kvtable::KeysThatMeetAreFound();
  kvtable::RowsComeBackAtEverySize();
  kvtable::RowsOfManyBitsMakeRoomForThemselves();
  kvtable::GrowthStaysWithinItsLoad();
  kvtable::ShardsGrowTogether();
  kvtable::AbsentKeysAreFewBucketsAwayAfterLongUse();
  return 0;
}
