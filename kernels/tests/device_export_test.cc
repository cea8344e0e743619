// Exports of the table in device memory, run on threads: while it grows, shrinks and changes its slots; and
// of rows that meet conditions.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "../cuda/threads_table.h"
#include "base/hash.h"
#include "check.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "pool.h"
#include "throws.h"

namespace kvtable {
namespace {

std::unique_ptr<DeviceTable> Make(KeyType key_type) {
  DeviceTableOptions options;
  options.name = "exported";
  options.key_type = key_type;
  options.dim = 2;
  options.slots = {{"m", 1, SlotSpec::Init::kConstant, 3.0}};
  return MakeThreadsTable(options, &Pool());
}

// The value of a key's row.
template <class Key>
float ValueOf(Key key) {
  return static_cast<float>(Mix64(static_cast<uint64_t>(key)) % 1000);
}

template <class Key>
void Insert(DeviceTable* table, const std::vector<Key>& keys) {
  std::vector<float> rows;
  for (const Key key : keys) rows.insert(rows.end(), 2, ValueOf(key));
  table->Upsert({keys.data(), static_cast<int64_t>(keys.size()), false}, rows.data(), {1, 1}, nullptr);
}

// The next chunk's keys, each of which must be new.
template <class Key>
bool Read(DeviceExporter* exporter, int64_t capacity, std::set<Key>* keys) {
  std::vector<Key> chunk(static_cast<size_t>(capacity));
  std::vector<float> values(chunk.size() * 2);
  std::vector<uint32_t> freqs(chunk.size());
  DeviceExporter::Buffers out;
  out.keys = chunk.data();
  out.freqs = freqs.data();
  out.columns = {{0, values.data(), 2}};
  const int64_t most = exporter->max_rows();
  const int64_t n = exporter->Next(capacity, out, nullptr);
  CHECK(n <= capacity && n <= most);
  for (size_t i = 0; n > 0 && i < static_cast<size_t>(n); ++i) {
    CHECK(keys->insert(chunk[i]).second);
    CHECK(values[2 * i] == ValueOf(chunk[i]) && values[2 * i + 1] == values[2 * i] && freqs[i] >= 1);
  }
  return n > 0;
}

// Between chunks the table grows manyfold, its slots change, and rows go.
template <class Key>
void RowsThatAreThereThroughoutComeOnce(KeyType key_type, uint64_t seed) {
  uint64_t state = seed;
  const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
  const auto table = Make(key_type);
  std::vector<Key> first = {std::numeric_limits<Key>::min(), std::numeric_limits<Key>::max(), Key{0},
                            static_cast<Key>(-1), Key{1}};
  for (int i = 0; i < 3000; ++i) first.push_back(static_cast<Key>(Mix64(next(1u << 30))));
  Insert(table.get(), first);
  std::set<Key> stay(first.begin(), first.end());
  std::set<Key> there = stay;
  const auto exporter = table->Export({});
  std::set<Key> exported;
  for (int chunk = 0; Read(exporter.get(), static_cast<int64_t>(1 + next(300)), &exported); ++chunk) {
    switch (next(4)) {
      case 0: {
        std::vector<Key> more;
        while (more.size() < 2000 && there.size() < 30000) {
          const Key key = static_cast<Key>(Mix64(~next(1u << 30)));
          if (there.insert(key).second) more.push_back(key);
        }
        Insert(table.get(), more);
        break;
      }
      case 1: {
        std::vector<Key> gone;
        for (const Key key : stay) {
          if (next(20) == 0) gone.push_back(key);
        }
        for (const Key key : gone) stay.erase(key);
        table->Remove({gone.data(), static_cast<int64_t>(gone.size()), true}, nullptr);
        break;
      }
      case 2:
        table->EnsureSlots({{"m", static_cast<int64_t>(1 + next(3)), SlotSpec::Init::kConstant, 1.0}},
                           nullptr);
        break;
      default:
        if (chunk % 7 == 0) table->Reserve(table->Size() * 2, 10, nullptr);
    }
  }
  CHECK(exporter->max_rows() == 0 && exporter->Next(10, {}, nullptr) == 0);
  CHECK(std::includes(exported.begin(), exported.end(), stay.begin(), stay.end()));
  CHECK(std::includes(there.begin(), there.end(), exported.begin(), exported.end()));
}

// Keys at home in the last bucket, and so many of them that they go on in the first ones.
void KeysThatPassedTheEndComeOnce(int64_t capacity) {
  const auto table = Make(KeyType::kInt64);
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < 100; ++key) {
    if (Mix64(static_cast<uint64_t>(key)) >> 56 == 255) keys.push_back(key);
  }
  for (int64_t key = 0; keys.size() < 130; ++key) {
    if (Mix64(static_cast<uint64_t>(key)) >> 58 == 0) keys.push_back(key);
  }
  Insert(table.get(), keys);
  std::set<int64_t> exported;
  const auto exporter = table->Export({});
  while (Read(exporter.get(), capacity, &exported)) {
  }
  CHECK(exported == std::set<int64_t>(keys.begin(), keys.end()));
}

void AnEmptyTableHasNothingToExport() {
  const auto table = Make(KeyType::kInt64);
  const auto exporter = table->Export({});
  std::set<int64_t> exported;
  while (Read(exporter.get(), 1, &exported)) {
  }
  CHECK(exported.empty());
}

void AWidthThatChangedIsAnError() {
  const auto table = Make(KeyType::kInt64);
  Insert<int64_t>(table.get(), {1, 2, 3});
  std::vector<float> slots(6);
  DeviceExporter::Buffers out;
  out.columns = {{1, slots.data(), 1}};
  const auto exporter = table->Export({});
  table->EnsureSlots({{"m", 2, SlotSpec::Init::kConstant, 8.0}}, nullptr);
  CHECK(Throws(ErrorCode::kFailedPrecondition, [&] { exporter->Next(3, out, nullptr); }));
  out.columns = {{1, slots.data(), 2}};
  CHECK(exporter->Next(3, out, nullptr) == 3 && slots[0] == 8.0f && slots[5] == 8.0f);
}

// The rows that meet random conditions, exported and then removed, against a map.
template <class Key>
void ConditionsChooseRows(KeyType key_type, uint64_t seed) {
  uint64_t state = seed;
  const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
  struct Stamps {
    uint32_t frequency;
    uint32_t version;
  };
  for (int round = 0; round < 40; ++round) {
    const auto table = Make(key_type);
    std::map<Key, Stamps> model;
    model[std::numeric_limits<Key>::min()] = {0, UINT32_MAX};
    model[std::numeric_limits<Key>::max()] = {UINT32_MAX, 0};
    for (int i = 0; i < 500; ++i) {
      model[static_cast<Key>(Mix64(next(1000)))] = {static_cast<uint32_t>(next(10)),
                                                    static_cast<uint32_t>(next(10))};
    }
    std::vector<Key> keys;
    std::vector<uint32_t> freqs;
    std::vector<uint32_t> versions;
    for (const auto& [key, stamps] : model) {
      keys.push_back(key);
      freqs.push_back(stamps.frequency);
      versions.push_back(stamps.version);
    }
    const int64_t n = static_cast<int64_t>(keys.size());
    table->Import({keys.data(), n, true}, {}, freqs.data(), versions.data(), nullptr, nullptr);

    RowPredicate predicate;
    const auto bounds = [&](auto* least, auto* most, uint64_t below) {
      using T = std::remove_pointer_t<decltype(least)>;
      if (next(2) == 0) *least = static_cast<T>(next(below));
      if (next(2) == 0) *most = static_cast<T>(*least + next(below));
    };
    bounds(&predicate.least_frequency, &predicate.most_frequency, 10);
    bounds(&predicate.least_version, &predicate.most_version, 10);
    if (next(2) == 0) {
      predicate.key_mask = 15;
      bounds(&predicate.least_key, &predicate.most_key, 16);
    } else if (next(2) == 0) {
      predicate.least_key = uint64_t{1} << 63;  // negative ones
    }
    const auto single = static_cast<RowPredicate::Test>(next(5));
    const uint32_t bound = static_cast<uint32_t>(next(4));
    if (round % 3 == 0) predicate = RowPredicate(single, bound);
    const auto meant = [&](Key key, const Stamps& stamps) {
      if (round % 3 == 0) {
        switch (single) {
          case RowPredicate::Test::kFrequencyBelow:
            return stamps.frequency < bound;
          case RowPredicate::Test::kFrequencyAtLeast:
            return stamps.frequency >= bound;
          case RowPredicate::Test::kVersionBelow:
            return stamps.version < bound;
          case RowPredicate::Test::kVersionAtLeast:
            return stamps.version >= bound;
          default:
            return true;
        }
      }
      const uint64_t masked = static_cast<uint64_t>(static_cast<int64_t>(key)) & predicate.key_mask;
      return predicate.least_frequency <= stamps.frequency && stamps.frequency <= predicate.most_frequency &&
             predicate.least_version <= stamps.version && stamps.version <= predicate.most_version &&
             predicate.least_key <= masked && masked <= predicate.most_key;
    };
    std::set<Key> expected;
    for (const auto& [key, stamps] : model) {
      if (meant(key, stamps)) expected.insert(key);
    }
    std::set<Key> exported;
    std::vector<Key> chunk(1 + next(200));
    DeviceExporter::Buffers out;
    out.keys = chunk.data();
    const auto exporter = table->Export(predicate);
    int chunks = 0;
    for (int64_t m; (m = exporter->Next(static_cast<int64_t>(chunk.size()), out, nullptr)) > 0; ++chunks) {
      for (int64_t i = 0; i < m; ++i) CHECK(exported.insert(chunk[static_cast<size_t>(i)]).second);
    }
    CHECK(exported == expected);
    uint64_t removed = 0;
    table->RemoveIf(predicate, &removed, nullptr);
    CHECK(removed == expected.size() && table->Size() == n - static_cast<int64_t>(removed));
    const auto found = std::make_unique<bool[]>(keys.size());
    table->Contains({keys.data(), n, true}, found.get(), nullptr);
    for (size_t i = 0; i < keys.size(); ++i) CHECK(found[i] == (expected.count(keys[i]) == 0));
    table->Remove({nullptr, 0, false}, &removed, nullptr);
    CHECK(removed == 0);
  }
}

void ScoresChooseRowsOfABoundedTable() {
  DeviceTableOptions options;
  options.dim = 1;
  options.max_capacity = 1000;
  options.eviction = Eviction::kCustom;
  const auto table = MakeThreadsTable(options, &Pool());
  std::vector<int64_t> keys(900);
  std::vector<uint64_t> scores(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(i) * 31;
    scores[i] = i == 5 ? UINT64_MAX : i;
  }
  const std::vector<float> rows(keys.size());
  const DeviceKeys batch{keys.data(), static_cast<int64_t>(keys.size()), true};
  table->Upsert(batch, rows.data(), {}, nullptr);
  table->SetScores(batch, scores.data(), nullptr);
  RowPredicate predicate;
  predicate.least_score = 100;
  predicate.most_score = 149;
  predicate.key_mask = 1;
  predicate.most_key = 0;
  std::vector<int64_t> exported(keys.size());
  std::vector<uint64_t> of_exported(keys.size());
  DeviceExporter::Buffers out;
  out.keys = exported.data();
  out.scores = of_exported.data();
  const auto exporter = table->Export(predicate);
  int64_t n = 0;
  for (int64_t m; (m = exporter->Next(1000, out, nullptr)) > 0; n += m) {
    for (size_t i = 0; i < static_cast<size_t>(m); ++i) {
      CHECK(exported[i] == static_cast<int64_t>(of_exported[i]) * 31 && exported[i] % 2 == 0);
    }
  }
  CHECK(n == 25);
  uint64_t removed = 0;
  predicate = {};
  predicate.least_score = 850;
  table->RemoveIf(predicate, &removed, nullptr);
  CHECK(removed == 51 && table->Size() == 849);
}

}  // namespace
}  // namespace kvtable

int main() {
#if defined(KVTABLE_TEST_FEW_ROUNDS)
  constexpr uint64_t kSeeds = 1;
#else
  constexpr uint64_t kSeeds = 6;
#endif
  using kvtable::KeyType;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    kvtable::RowsThatAreThereThroughoutComeOnce<int64_t>(KeyType::kInt64, seed << 32);
    kvtable::RowsThatAreThereThroughoutComeOnce<int32_t>(KeyType::kInt32, seed << 33);
    kvtable::RowsThatAreThereThroughoutComeOnce<uint64_t>(KeyType::kUint64, seed << 34);
  }
  for (const int64_t capacity : {1, 2, 7, 1000}) kvtable::KeysThatPassedTheEndComeOnce(capacity);
  kvtable::AnEmptyTableHasNothingToExport();
  kvtable::AWidthThatChangedIsAnError();
  kvtable::ScoresChooseRowsOfABoundedTable();
  kvtable::ConditionsChooseRows<int64_t>(KeyType::kInt64, 1);
  kvtable::ConditionsChooseRows<int32_t>(KeyType::kInt32, 2);
  kvtable::ConditionsChooseRows<uint64_t>(KeyType::kUint64, 3);
  return 0;
}
