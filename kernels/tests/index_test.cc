// The index against a map, with as many removals as insertions, in tables so small that buckets overflow all
// the time.
#include "table/index.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "base/hash.h"

namespace kvtable {
namespace {

void AgreesWithAMap(uint64_t keys, int rounds, uint64_t seed) {
  BucketIndex index(true);
  std::unordered_map<uint64_t, uint32_t> model;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t random = Mix64(seed + static_cast<uint64_t>(round));
    const uint64_t key = random % keys;
    const uint64_t hash = Mix64(key);
    const auto it = model.find(key);
    const uint32_t found = index.Find(key, index.Home(hash));
    CHECK(found == (it == model.end() ? BucketIndex::kNoRow : it->second));
    if (random >> 63 != 0) {
      CHECK(index.Erase(key, hash) == found);
      model.erase(key);
    } else if (it == model.end()) {
      const uint32_t row = static_cast<uint32_t>(round);
      index.PrepareInsert();
      index.Insert(key, hash, row);
      model[key] = row;
    }
    CHECK(index.size() == model.size());
  }
  for (const auto& [key, row] : model) CHECK(index.Find(key, index.Home(Mix64(key))) == row);
}

void EmptyIndexFindsNothing() {
  BucketIndex index(false);
  CHECK(index.Find(0, index.Home(Mix64(0))) == BucketIndex::kNoRow);
  CHECK(index.Erase(0, Mix64(0)) == BucketIndex::kNoRow);
  CHECK(index.bytes() == 0);
}

void GrowthStaysWithinItsLoad() {
  BucketIndex index(true);
  for (uint64_t key = 0; key < 1'000'000; ++key) {
    index.PrepareInsert();
    index.Insert(key, Mix64(key), static_cast<uint32_t>(key));
    const double per_key = static_cast<double>(index.bytes()) / static_cast<double>(index.size());
    CHECK(key < 1'000 || per_key >= 16.0);
    CHECK(key < 200'000 || per_key <= 26.0);
  }
  CHECK(index.MaxProbeLength() <= 40);
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::EmptyIndexFindsNothing();
  for (uint64_t seed = 0; seed < 20; ++seed) kvtable::AgreesWithAMap(40, 20000, seed << 40);
  kvtable::AgreesWithAMap(100000, 300000, 99);
  kvtable::GrowthStaysWithinItsLoad();
  return 0;
}
