// Bounded tables from many threads: rows stay whole, the capacity holds whenever nobody is at work, and each
// row is evicted once.
#include "kvtable/eviction.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "eviction/eviction_score.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"

namespace kvtable {
namespace {

constexpr int64_t kDim = 5;
constexpr int64_t kBatch = 600;
constexpr int64_t kCapacity = 2000;
constexpr uint64_t kKeys = 7000;

class Evicted : public EvictedRows {
 public:
  void Allocate(int64_t n, void** keys_out, void** values_out) override {
    keys.resize(static_cast<size_t>(n));
    values.resize(static_cast<size_t>(n * kDim));
    *keys_out = keys.data();
    *values_out = values.data();
  }
  std::vector<int64_t> keys;
  std::vector<float> values;
};

bool AreWhole(const std::vector<float>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != rows[i / kDim * kDim]) return false;
  }
  return true;
}

void MixOperations(Table* table, ParallelFor* pool, uint64_t seed, int rounds) {
  uint64_t state = seed;
  const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
  std::vector<int64_t> keys(kBatch);
  std::vector<float> rows(kBatch * kDim);
  std::vector<uint64_t> positions(kBatch);
  std::vector<uint64_t> scores(kBatch);
  for (int round = 0; round < rounds; ++round) {
    for (int64_t i = 0; i < kBatch; ++i) {
      keys[i] = static_cast<int64_t>(next(kKeys));
      scores[i] = next(5);
      const float number = static_cast<float>(next(1000));
      for (int64_t j = 0; j < kDim; ++j) rows[i * kDim + j] = number;
    }
    switch (next(12)) {
      case 0:
      case 1:
      case 2: {
        Evicted evicted;
        Insertion insertion;
        insertion.admission = next(2) == 0 ? 1.0 : 0.5;
        insertion.admission_seed = state;
        insertion.evicted = &evicted;
        table->GatherOrInsert(keys.data(), kBatch, {rows.data(), positions.data()}, insertion, *pool);
        CHECK(AreWhole(rows) && AreWhole(evicted.values));
        CHECK(std::set<int64_t>(evicted.keys.begin(), evicted.keys.end()).size() == evicted.keys.size());
        break;
      }
      case 3:
        table->Upsert(keys.data(), kBatch, rows.data(), {1, 6}, *pool);
        break;
      case 4:
        table->Accumulate(keys.data(), kBatch, rows.data(), true, {1, 7}, *pool);
        break;
      case 5:
        table->Apply(keys.data(), positions.data(), kBatch, rows.data(),
                     MakeUpdate("sgd", {{"learning_rate", 0.5}}), {}, {1, 8}, *pool);
        break;
      case 6:
        table->Remove(keys.data(), kBatch / 4, *pool);
        if (next(8) == 0) table->Clear();
        break;
      case 7:
        table->Import(keys.data(), kBatch, {{0, rows.data(), kDim}}, nullptr, nullptr, scores.data(), *pool);
        break;
      case 8:
        if (table->eviction() == Eviction::kEpochLru || table->eviction() == Eviction::kEpochLfu) {
          table->SetEpoch(static_cast<uint32_t>(round) / 8);
        }
        if (table->eviction() == Eviction::kCustom) {
          table->SetScores(keys.data(), kBatch, scores.data(), *pool);
        }
        table->Scores(keys.data(), kBatch, scores.data(), *pool);
        CHECK(table->Memory().rows <= kCapacity + 5 * kBatch);
        break;
      case 9: {
        const auto exporter = table->Export();
        Exporter::Buffers out;
        out.scores = scores.data();
        out.columns = {{0, rows.data(), kDim}};
        while (exporter->Next(kBatch, out, *pool) > 0) CHECK(AreWhole(rows));
        break;
      }
      case 10:
        table->EnsureSlots(next(2) == 0 ? std::vector<SlotSpec>{{"m", 3, SlotSpec::Init::kConstant, 7.0}}
                                        : std::vector<SlotSpec>{},
                           *pool);
        break;
      case 11:
        table->Gather(keys.data(), kBatch, rows.data(), Missing::kZeros, nullptr, 0, nullptr, *pool);
        CHECK(AreWhole(rows));
        break;
    }
  }
}

std::unique_ptr<Table> MakeBounded(Eviction eviction, int64_t capacity) {
  TableOptions options;
  options.dim = kDim;
  options.initializer.a = 0.5;
  options.shards = 8;
  options.max_capacity = capacity;
  options.eviction = eviction;
  return Table::Create(options);
}

void EveryOperationAtOnceKeepsTheCapacity(Eviction eviction) {
  const auto table = MakeBounded(eviction, kCapacity);
  const auto pool = MakeThreadPool(3);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&, t] { MixOperations(table.get(), t % 2 == 0 ? pool.get() : &Serial(), t << 32, 150); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(table->Size() <= kCapacity);
}

void EveryRowIsEvictedOnce() {
  const auto table = MakeBounded(Eviction::kLfu, 1000);
  const auto pool = MakeThreadPool(2);
  constexpr int kThreads = 4;
  constexpr int kRounds = 40;
  std::atomic<int64_t> evicted_rows{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<int64_t> keys(kBatch);
      std::vector<float> rows(kBatch * kDim);
      for (int round = 0; round < kRounds; ++round) {
        for (int64_t i = 0; i < kBatch; ++i) keys[i] = ((t * kRounds + round) * kBatch + i) * 1000003;
        Evicted evicted;
        Insertion insertion;
        insertion.evicted = &evicted;
        table->GatherOrInsert(keys.data(), kBatch, rows.data(), insertion, *pool);
        evicted_rows += static_cast<int64_t>(evicted.keys.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(table->Size() == 1000);
  CHECK(evicted_rows == table->EvictedCount());
  CHECK(evicted_rows == int64_t{kThreads} * kRounds * kBatch - 1000);
}

// Who goes, and in which order, is as a dictionary that is sorted has it: also where several threads share out the rows of
// a batch, keys come more than once in it, and what was listed to go rises or is joined by rows that are lower still.
void TheLowestGoInOrder(Eviction eviction, ParallelFor& threads) {
  constexpr int64_t kRows = 20'000;
  constexpr int64_t kMany = 12'000;  // keys of a batch
  const auto table = MakeBounded(eviction, kRows);
  std::map<int64_t, std::pair<int64_t, int64_t>>
      ranks;  // of a key: its count, or 0; and when it was touched last
  int64_t time = 0;
  uint64_t state = 7;
  int64_t next_key = 0;
  int64_t gone = 0;
  for (int round = 0; round < 40; ++round) {
    // Small batches, too, so that lists last for several; all new keys, few, or hot ones.
    const int64_t n = round % 3 == 0 ? kMany : 700;
    const uint64_t known = round % 4 == 1 ? 1 : 3 + static_cast<uint64_t>(round % 2) * 40;
    std::vector<int64_t> keys(static_cast<size_t>(n));
    for (int64_t& key : keys) {
      const uint64_t draw = Mix64(++state);
      const int64_t old = static_cast<int64_t>(draw >> 32) % (next_key + 1);
      key = draw % known == 0 ? next_key++ : round % 5 == 0 ? old % 50 : old;
    }
    std::vector<float> rows(static_cast<size_t>(n * kDim));
    std::vector<uint64_t> positions(static_cast<size_t>(n));
    Evicted evicted;
    Insertion insertion;
    insertion.evicted = &evicted;
    table->GatherOrInsert(keys.data(), n, {rows.data(), positions.data()}, insertion, threads);
    for (const int64_t key : keys) {
      auto& rank = ranks[key];
      rank = {eviction == Eviction::kLfu ? rank.first + 1 : 0, ++time};
    }
    const std::set<int64_t> batch(keys.begin(), keys.end());
    std::vector<std::pair<std::pair<int64_t, int64_t>, int64_t>> others;
    for (const auto& [key, rank] : ranks) {
      if (batch.count(key) == 0) others.push_back({rank, key});
    }
    std::sort(others.begin(), others.end());
    others.resize(std::max<size_t>(ranks.size(), kRows) - kRows);
    CHECK(evicted.keys.size() == others.size());
    for (size_t i = 0; i < others.size(); ++i) {
      CHECK(evicted.keys[i] == others[i].second);
      ranks.erase(others[i].second);
    }
    gone += static_cast<int64_t>(others.size());
    CHECK(table->Size() == static_cast<int64_t>(ranks.size()));
  }
  CHECK(gone > kRows);
}

void LookupsOfPartsMeetInOneTable() {
  // A thread that waits for a table inside a task of one lookup holds up nobody's tasks of another.
  const auto a = MakeBounded(Eviction::kLru, kCapacity);
  const auto b = MakeBounded(Eviction::kLru, kCapacity);
  const auto pool = MakeThreadPool(3);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<int64_t> keys(20 * kBatch);
      std::vector<float> rows(keys.size() * kDim * 3);
      for (uint64_t round = 0; round < 30; ++round) {
        for (size_t i = 0; i < keys.size(); ++i)
          keys[i] = static_cast<int64_t>(Mix64(t << 40 | round << 20 | i) % kKeys);
        MissingKeys missing;
        missing.insert = true;
        const int64_t n = static_cast<int64_t>(keys.size());
        float* const out = rows.data();
        if (round % 2 == 0) {
          LookUpParts({{{a.get(), b.get()}, keys.data(), n, out, missing},
                       {{b.get()}, keys.data(), n, out + n * kDim, missing},
                       {{a.get()}, keys.data(), n, out + 2 * n * kDim, missing}},
                      *pool);
        } else {
          LookUpParts({{{a.get()}, keys.data(), n, out, missing}}, *pool);
        }
        CHECK(AreWhole(rows));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(a->Size() <= kCapacity && b->Size() <= kCapacity);
}

// A table with a clock that the test sets, in seconds.
class Clocked {
 public:
  Clocked(Eviction eviction, int64_t capacity) {
    TableOptions options;
    options.dim = 1;
    options.max_capacity = capacity;
    options.eviction = eviction;
    options.clock = [this] { return uint64_t{second} * 1000000; };
    table = Table::Create(options);
  }
  void Touch(const std::vector<int64_t>& keys) {
    std::vector<float> rows(keys.size());
    table->GatherOrInsert(keys.data(), static_cast<int64_t>(keys.size()), rows.data(), {}, nullptr, Serial());
  }
  uint64_t ScoreOf(int64_t key) const {
    uint64_t score = 0;
    table->Scores(&key, 1, &score, Serial());
    return score;
  }
  std::set<int64_t> Keys() const {
    std::vector<int64_t> keys(100);
    Exporter::Buffers out;
    out.keys = keys.data();
    const auto exporter = table->Export();
    std::set<int64_t> all;
    for (int64_t n; (n = exporter->Next(100, out, Serial())) > 0;) all.insert(keys.begin(), keys.begin() + n);
    return all;
  }

  std::unique_ptr<Table> table;
  uint32_t second = 1000;
};

void RowsOfLowerEpochsGoFirst() {
  Clocked lru(Eviction::kEpochLru, 3);
  lru.table->SetEpoch(7);
  lru.Touch({1, 2});
  lru.second = 2000;
  lru.table->SetEpoch(6);  // it should not fall, but what it says holds
  lru.Touch({3});
  CHECK(lru.ScoreOf(1) == (uint64_t{7} << 32 | 1000) && lru.ScoreOf(3) == (uint64_t{6} << 32 | 2000));
  lru.table->SetEpoch(8);
  lru.Touch({4, 5});
  CHECK((lru.Keys() == std::set<int64_t>{2, 4, 5}));  // 1 and 2 in the order of the batch
  Clocked lfu(Eviction::kEpochLfu, 2);
  lfu.Touch({1, 1, 1, 1});
  lfu.table->SetEpoch(1);
  lfu.Touch({2});
  lfu.Touch({3});
  CHECK((lfu.Keys() == std::set<int64_t>{2, 3}));
}

void CountsGoOnFromEpochToEpoch() {
  Clocked lfu(Eviction::kEpochLfu, 2);
  lfu.Touch({1, 1, 1});
  lfu.table->SetEpoch(1);
  lfu.Touch({2, 2, 1});
  CHECK(lfu.ScoreOf(1) == (uint64_t{1} << 32 | 4) && lfu.ScoreOf(2) == (uint64_t{1} << 32 | 2));
  lfu.Touch({3});
  CHECK((lfu.Keys() == std::set<int64_t>{1, 3}));
  const int64_t key = 3;
  const uint64_t most = UINT64_MAX;
  const float row = 0;
  lfu.table->Import(&key, 1, {{0, &row, 1}}, nullptr, nullptr, &most, Serial());
  lfu.Touch({3, 3});
  CHECK(lfu.ScoreOf(3) == (uint64_t{1} << 32 | UINT32_MAX));  // the count stays there
}

void ImportedRowsAreOfThePresentEpoch() {
  for (const Eviction eviction : {Eviction::kEpochLru, Eviction::kEpochLfu}) {
    Clocked from(eviction, 2);
    from.table->SetEpoch(4);
    const int64_t key = 9;
    const float row = 0;
    const uint32_t frequency = 11;
    const uint32_t version = 500;
    from.table->Import(&key, 1, {{0, &row, 1}}, &frequency, &version, nullptr, Serial());
    CHECK(from.ScoreOf(9) == (uint64_t{4} << 32 | (eviction == Eviction::kEpochLru ? 500 : 11)));
  }
}

void OnlyTablesOfEpochsTakeThem() {
  const auto unbounded = MakeBounded(Eviction::kEpochLru, 0);
  const auto lru = MakeBounded(Eviction::kLru, 5);
  for (Table* const table : {unbounded.get(), lru.get()}) {
    ErrorCode code = ErrorCode::kInvalidArgument;
    try {
      table->SetEpoch(1);
    } catch (const Error& error) {
      code = error.code();
    }
    CHECK(code == ErrorCode::kFailedPrecondition);
  }
}

// A row may say that it was touched at the end of all seconds, and the clock goes on from there.
void ScoresStandStillAfterTheLastSecond() {
  for (const Eviction eviction : {Eviction::kLfu, Eviction::kEpochLru}) {
    const uint64_t last = TouchedScore(eviction, 3, UINT32_MAX * kMicroseconds, 3);
    CHECK(TouchedScore(eviction, 3, UINT32_MAX * kMicroseconds + kMicroseconds, 3) == last);
    CHECK(TouchedScore(eviction, 3, UINT64_MAX, 3) == last);
    CHECK(TouchedScore(eviction, 3, UINT32_MAX * kMicroseconds - 1, 3) < last);
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::ScoresStandStillAfterTheLastSecond();
  kvtable::EveryRowIsEvictedOnce();
  const auto pool = kvtable::MakeThreadPool(4);
  for (const auto eviction : {kvtable::Eviction::kLru, kvtable::Eviction::kLfu}) {
    kvtable::TheLowestGoInOrder(eviction, *pool);
    kvtable::TheLowestGoInOrder(eviction, kvtable::Serial());
  }
  kvtable::LookupsOfPartsMeetInOneTable();
  kvtable::RowsOfLowerEpochsGoFirst();
  kvtable::CountsGoOnFromEpochToEpoch();
  kvtable::ImportedRowsAreOfThePresentEpoch();
  kvtable::OnlyTablesOfEpochsTakeThem();
  for (const auto eviction : {kvtable::Eviction::kLru, kvtable::Eviction::kLfu, kvtable::Eviction::kCustom,
                              kvtable::Eviction::kEpochLru, kvtable::Eviction::kEpochLfu}) {
    kvtable::EveryOperationAtOnceKeepsTheCapacity(eviction);
  }
  return 0;
}
