// Rows that go by age, norm, frequency and rank beside training: nobody sees a row past its age, every row is
// whole, each goes once, and memory is used again.
#include "kvtable/expiry.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "spilled.h"
#include "throws.h"

namespace kvtable {
namespace {

constexpr int64_t kDim = 5;
constexpr int64_t kBatch = 400;
constexpr uint64_t kKeys = 6000;
constexpr uint32_t kMaxAge = 6;

using Kind = EvictPolicy::Kind;

bool AreWhole(const std::vector<float>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != rows[i / kDim * kDim]) return false;
  }
  return true;
}

std::unique_ptr<Table> MakeTable(int64_t max_capacity, bool spilled = false) {
  TableOptions options;
  options.dim = kDim;
  options.initializer.a = 0.5;
  options.shards = 8;
  options.slots = {{"m", 3, SlotSpec::Init::kConstant, 7.0}};
  options.max_capacity = max_capacity;
  options.eviction = Eviction::kLfu;
  options.expiry.unit = AgeUnit::kSteps;
  options.expiry.max_age = kMaxAge;
  if (spilled) options = Spilled(options, (kDim + 3) * 4);
  return Table::Create(options);
}

// Looks keys up, trains them, and counts the rows that it made.
void Train(Table* table, ParallelFor* pool, uint64_t seed, std::atomic<int64_t>* born) {
  std::vector<int64_t> keys(kBatch);
  std::vector<float> rows(kBatch * kDim);
  std::vector<uint64_t> positions(kBatch);
  const std::unique_ptr<bool[]> inserted = std::make_unique<bool[]>(kBatch);
  for (uint64_t round = 0; round < 120; ++round) {
    std::set<int64_t> distinct;
    while (distinct.size() < kBatch) {
      distinct.insert(static_cast<int64_t>(Mix64(++seed) % kKeys));
    }
    std::copy(distinct.begin(), distinct.end(), keys.begin());
    Insertion insertion;
    insertion.inserted = inserted.get();
    table->GatherOrInsert(keys.data(), kBatch, {rows.data(), positions.data()}, insertion, *pool);
    CHECK(AreWhole(rows));
    for (int64_t i = 0; i < kBatch; ++i) *born += inserted[static_cast<size_t>(i)] ? 1 : 0;
    for (float& x : rows) x = -1.0f;
    Stamp stamp{1, 0};
    stamp.existing_only = true;  // so that only lookups make rows
    table->Apply(keys.data(), positions.data(), kBatch, rows.data(),
                 MakeUpdate("sgd", {{"learning_rate", 1.0}}), {}, stamp, *pool);
  }
}

// Reads beside it.
void Watch(const Table* table, const std::atomic<bool>* ended, ParallelFor* pool) {
  std::vector<int64_t> keys(kKeys);
  std::vector<uint32_t> freqs(kKeys);
  std::vector<uint32_t> versions(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = static_cast<int64_t>(i);
  while (!*ended) {
    const uint32_t before = table->Now();
    table->GatherStamps(keys.data(), kKeys, freqs.data(), versions.data(), *pool);
    for (size_t i = 0; i < kKeys; ++i) {
      const bool is_there = freqs[i] != 0;  // it was trained
      CHECK(!is_there || versions[i] + kMaxAge > before);
    }
    std::vector<float> rows(kKeys * kDim);
    table->Gather(keys.data(), kKeys, rows.data(), Missing::kZeros, nullptr, 0, nullptr, *pool);
    CHECK(AreWhole(rows));
    const auto exporter = table->Export();
    Exporter::Buffers out;
    out.columns = {{0, rows.data(), kDim}};
    while (exporter->Next(kBatch, out, *pool) > 0) CHECK(AreWhole(rows));
  }
}

void RowsGoBesideTraining(int64_t max_capacity, bool spilled = false) {
  const auto table = MakeTable(max_capacity, spilled);
  const auto pool = MakeThreadPool(3);
  std::atomic<int64_t> born{0};
  std::atomic<bool> ended{false};
  std::vector<std::thread> others;
  others.emplace_back([&] { Watch(table.get(), &ended, pool.get()); });
  others.emplace_back([&] {
    Sweep sweep({{Kind::kAfterSteps, kMaxAge, 0, {}},
                 {Kind::kBelowNorm, 0, 1.0, {}},
                 {Kind::kKeepTop, 3000, 0, RankBy::kNorm}});
    while (!ended) sweep.Run(table.get(), 300, Serial());
  });
  others.emplace_back([&] {
    for (uint64_t round = 0; !ended; ++round) {
      Evict(table.get(), {Kind::kBelowFrequency, 1, 0, {}}, *pool);
      Evict(table.get(), {Kind::kKeepTop, 2500, 0, round % 2 == 0 ? RankBy::kFrequency : RankBy::kVersion},
            *pool);
      table->Memory();
    }
  });
  std::vector<std::thread> trainers;
  for (uint64_t t = 0; t < 3; ++t) {
    trainers.emplace_back(
        [&, t] { Train(table.get(), t % 2 == 0 ? pool.get() : &Serial(), t << 32, &born); });
  }
  for (std::thread& thread : trainers) thread.join();
  ended = true;
  for (std::thread& thread : others) thread.join();
  CHECK(table->Now() == 360);
  CHECK(born == table->Size() + table->EvictedCount() + table->ExpiredCount());
  CHECK(max_capacity == 0 || table->Size() <= max_capacity);
  EvictExpired(table.get(), *pool);
  std::vector<int64_t> keys(kKeys);
  Exporter::Buffers out;
  out.keys = keys.data();
  const auto exporter = table->Export();
  int64_t rows = 0;
  for (int64_t n; (n = exporter->Next(kKeys, out, Serial())) > 0; rows += n) {
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(static_cast<size_t>(n));
    table->Contains(keys.data(), n, there.get(), Serial());
    for (int64_t i = 0; i < n; ++i) CHECK(there[static_cast<size_t>(i)]);
  }
  CHECK(rows == table->Size());
}

// What went is in a log of changes, whichever way it went.
void RowsThatExpireAreAmongTheChanges() {
  const auto table = MakeTable(0);
  const std::vector<int64_t> keys = {1, 2, 3, 4};
  const std::vector<float> rows(keys.size() * kDim, 1.0f);
  const uint64_t since = table->TrackChanges(100);
  table->Upsert(keys.data(), 4, rows.data(), {1, 0}, Serial());
  const uint64_t version = table->CutChanges();
  CHECK(version != since);
  table->SetStep(kMaxAge);
  table->Upsert(keys.data(), 1, rows.data(), {1, 0}, Serial());  // makes key 1 anew
  CHECK(EvictExpired(table.get(), Serial()) == 3);
  MomentOptions options;
  options.since = version;
  const auto exporter = table->ExportMoment(options);
  std::vector<int64_t> changed(4);
  Exporter::Buffers out;
  out.keys = changed.data();
  CHECK(exporter->Next(4, out, Serial()) == 1 && changed[0] == 1);
  CHECK(exporter->Next(4, out, Serial()) == 0);
  CHECK(exporter->removed_rows() == 3);
  std::vector<int64_t> removed(3);
  exporter->RemovedKeys(removed.data());
  CHECK(std::set<int64_t>(removed.begin(), removed.end()) == (std::set<int64_t>{2, 3, 4}));
}

// Rows that have expired make room before rows that are there, whatever their scores.
void ExpiredRowsMakeRoom(bool spilled) {
  constexpr int64_t kRows = 2800;
  const auto table = MakeTable(kRows, spilled);
  std::vector<int64_t> keys(kRows);
  const std::vector<float> rows(keys.size() * kDim, 1.0f);
  const auto write = [&](int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = first + i;
    table->Upsert(keys.data(), n, rows.data(), {1, 0}, Serial());
  };
  const auto there = [&](int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = first + i;
    const std::unique_ptr<bool[]> found = std::make_unique<bool[]>(static_cast<size_t>(n));
    table->Contains(keys.data(), n, found.get(), Serial());
    return std::count(found.get(), found.get() + n, true);
  };
  for (int time = 0; time < 3; ++time) write(0, 2000);  // the highest scores
  table->SetStep(kMaxAge - 1);
  write(100, 10);  // not one of these expires
  write(2000, 800);
  CHECK(table->EvictedCount() == 0);
  table->SetStep(kMaxAge);
  for (int64_t batch = 0; batch < 199; ++batch) write(10000 + 10 * batch, 10);
  CHECK(table->Size() == kRows && table->EvictedCount() == 1990);
  CHECK(there(0, 2000) == 10 && there(2000, 800) == 800 && there(10000, 1990) == 1990);
  write(20000, 10);  // nothing has expired any more: the lowest scores go
  CHECK(there(0, 2000) == 10 && there(2000, 800) == 790 && there(20000, 10) == 10);
  table->SetStep(2 * kMaxAge - 1);
  write(10000, 1990);
  write(30000, 800);
  CHECK(there(10000, 1990) == 1990 && there(30000, 800) == 800 && table->Size() == kRows);
}

void MemoryIsUsedAgain() {
  const auto table = MakeTable(0);
  std::vector<int64_t> keys(20000);
  const std::vector<float> rows(keys.size() * kDim, 1.0f);
  int64_t most = 0;
  for (int64_t cycle = 0; cycle < 30; ++cycle) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = cycle * 20000 + static_cast<int64_t>(i);
    table->Upsert(keys.data(), 20000, rows.data(), {1, 0}, Serial());
    CHECK(Evict(table.get(), {Kind::kKeepTop, 10000, 0, RankBy::kVersion}, Serial()) ==
          (cycle == 0 ? 10000 : 20000));
    const MemoryUse use = table->Memory();
    const int64_t bytes = use.row_bytes + use.slack_bytes + use.index_bytes + use.column_bytes;
    if (cycle == 4) most = bytes;  // shards fill unevenly at first
    CHECK(cycle <= 4 || bytes <= most + most / 50);
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::RowsGoBesideTraining(0);
  kvtable::RowsGoBesideTraining(2800);
  kvtable::RowsGoBesideTraining(2800, true);
  kvtable::RowsThatExpireAreAmongTheChanges();
  kvtable::ExpiredRowsMakeRoom(false);
  kvtable::ExpiredRowsMakeRoom(true);
  kvtable::MemoryIsUsedAgain();
  return 0;
}
