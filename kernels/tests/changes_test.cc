// What changed since a version, and exports of one moment: against the table's own contents at that moment, with
// every kind of write in between, one after the other and from many threads.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "increments.h"
#include "kvtable/optimizer.h"
#include "kvtable/table.h"
#include "pool.h"
#include "spilled.h"
#include "throws.h"

namespace kvtable {
namespace {

TableOptions Options(int64_t max_capacity, Eviction eviction, bool spilled = false) {
  TableOptions options;
  options.dim = kDim;
  options.shards = 8;
  options.slots = {kSlot};
  options.initializer.a = 0.25;
  options.max_capacity = max_capacity;
  options.eviction = eviction;
  if (spilled) {
    options.shards = 2;
    options = Spilled(options, 2 * kDim * 4 + 2 * 4);
  }
  return options;
}

// A writer goes round all keys, one at a time: at any one moment the first ones are a round ahead of the others.
void AMomentIsOneMoment(int64_t max_capacity, bool spilled = false) {
  constexpr int64_t kCount = 3000;
  const auto table = Table::Create(Options(max_capacity, Eviction::kLru, spilled));
  const auto write = [&](int64_t key, float round) {
    const std::vector<float> value(kDim, round);
    const int64_t keys[] = {key};
    table->UpsertColumns(keys, 1, {{0, value.data(), kDim}, {1, value.data(), kDim}}, {1, 1}, Serial());
  };
  for (int64_t key = 0; key < kCount; ++key) write(key, 0);
  const uint64_t begin = table->TrackChanges(100000);
  std::atomic<bool> stop{false};
  std::thread rounds([&] {
    for (int round = 1; !stop; ++round) {
      for (int64_t key = 0; key < kCount && !stop; ++key) write(key, static_cast<float>(round));
    }
  });
  std::thread churn([&] {  // rows come and go in the same shards
    const std::vector<float> values(200 * kDim, 1.0f);
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 200; ++i) keys.push_back(1000000 + i);
    while (!stop) {
      table->Upsert(keys.data(), 200, values.data(), {}, Serial());
      table->Remove(keys.data(), 200, Serial());
    }
  });
  for (int i = 0; i < 8; ++i) {
    MomentOptions options;
    if (i % 2 == 1) options.since = begin;
    const auto exporter = table->ExportMoment(options);
    Rows rows;
    ReadInto(exporter.get(), table->schema(), 500, Serial(), &rows, [] { std::this_thread::yield(); });
    std::vector<uint32_t> numbers;
    for (const auto& [key, row] : rows) {
      if (key >= kCount) continue;
      for (size_t j = 5; j < row.size(); ++j) CHECK(row[j] == row[5]);
      float number;
      std::memcpy(&number, &row[5], sizeof(number));
      numbers.push_back(static_cast<uint32_t>(number));
    }
    CHECK(i % 2 == 1 || numbers.size() == kCount);
    for (size_t k = 1; k < numbers.size(); ++k) {
      CHECK(numbers[k] == numbers[k - 1] || numbers[k] + 1 == numbers[k - 1]);
    }
    CHECK(numbers.empty() || numbers.front() <= numbers.back() + 1);
    table->ForgetChanges(begin);
  }
  stop = true;
  rounds.join();
  churn.join();
}

// Increments taken while many threads write, read by two threads each, and side by side with a full export.
void IncrementsBesideManyWritersAreTheTable(int64_t max_capacity, bool spilled = false) {
  const auto table = Table::Create(Options(max_capacity, Eviction::kLfu, spilled));
  std::atomic<bool> stop{false};
  {
    Random random(1);
    for (int i = 0; i < 100; ++i) WriteSomething(table.get(), &random, 4000);
  }
  table->TrackChanges(1 << 20);
  std::vector<std::thread> writers;
  for (uint64_t t = 0; t < 3; ++t) {
    writers.emplace_back([&, t] {
      Random random(t + 100);
      while (!stop) WriteSomething(table.get(), &random, 4000);
    });
  }
  const RowSchema schema = table->schema();
  const auto read = [&](Exporter* exporter) {
    Rows parts[2];
    std::thread other([&] { ReadInto(exporter, schema, 64, Serial(), &parts[1], [] {}); });
    ReadInto(exporter, schema, 64, Serial(), &parts[0], [] {});
    other.join();
    for (auto& entry : parts[1]) CHECK(parts[0].insert(entry).second);
    return parts[0];
  };
  MomentOptions options;
  options.cut = true;
  auto full = table->ExportMoment(options);
  uint64_t version = full->version();
  Rows base = read(full.get());
  for (int round = 0; round < 15; ++round) {
    if (round == 14) {
      stop = true;
      for (std::thread& writer : writers) writer.join();
    }
    options.since = version;
    const auto increment = table->ExportMoment(options);
    std::unique_ptr<Exporter> beside;
    if (round % 5 == 0) beside = table->ExportMoment({});
    const Rows changed = read(increment.get());
    ApplyIncrement(changed, RemovedKeys(*increment), &base);
    if (beside != nullptr) read(beside.get());
    version = increment->version();
    table->ForgetChanges(version);
  }
  CHECK(base == Contents(table.get()));
}

void RowsAsideAreBounded() {
  constexpr int64_t kCount = 20000;
  const auto table = Table::Create(Options(0, Eviction::kLru));
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < kCount; ++key) keys.push_back(key);
  const std::vector<float> zeros(kCount * kDim, 0.0f);
  const std::vector<float> ones(1000 * kDim, 1.0f);
  table->Upsert(keys.data(), kCount, zeros.data(), {}, Pool());
  const Rows before = Contents(table.get());
  MomentOptions options;
  options.aside = std::make_shared<AsideMemory>(200000);
  auto exporter = table->ExportMoment(options);
  CHECK(!exporter->IsUrgent());
  std::thread writer([&] {
    for (int64_t i = 0; i < kCount; i += 1000)
      table->Upsert(keys.data() + i, 1000, ones.data(), {}, Serial());
  });
  while (!exporter->IsUrgent()) std::this_thread::yield();
  exporter->KeepAlive();
  Rows rows;
  int64_t most = 0;
  ReadInto(exporter.get(), table->schema(), 100, Serial(), &rows, [&] {
    most = std::max(most, options.aside->used());
    std::this_thread::yield();
  });
  writer.join();
  CHECK(rows == before);
  CHECK(most < 200000 + 1000 * 128 + 8 * 65536);  // one batch more, and a block of each shard begun
  exporter.reset();
  CHECK(options.aside->used() == 0);
}

void AnExportThatNobodyReadsIsGivenUp() {
  const auto table = Table::Create(Options(0, Eviction::kLru));
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 4000; ++key) keys.push_back(key);
  const std::vector<float> values(4000 * kDim);
  table->Upsert(keys.data(), 4000, values.data(), {}, Pool());
  for (int way = 0; way < 2; ++way) {
    MomentOptions options;
    options.aside = std::make_shared<AsideMemory>(0, std::chrono::milliseconds(1));
    const auto exporter = table->ExportMoment(options);
    if (way == 0) {
      table->Upsert(keys.data(), 4000, values.data(), {}, Pool());
      table->Upsert(keys.data(), 4000, values.data(), {}, Pool());  // would wait for ever
    } else {
      table->Clear();
    }
    int64_t key;
    Exporter::Buffers out;
    out.keys = &key;
    CHECK(Throws(ErrorCode::kFailedPrecondition, "given up", [&] {
      while (exporter->Next(1, out, Serial()) > 0) {
      }
    }));
  }
}

class MayNotWait : public ParallelFor {
 public:
  int threads() const override { return 1; }
  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override { Serial().Run(tasks, body); }
  bool may_wait() const override { return false; }
};

bool MustWaitFor(Table* table, const std::vector<SlotSpec>& slots) {
  MayNotWait here;
  try {
    table->EnsureSlots(slots, here);
  } catch (const MustWait&) {
    return true;
  }
  return false;
}

void SlotsAndClearWaitForAMoment(int64_t max_capacity, bool spilled = false) {
  const auto table = Table::Create(Options(max_capacity, Eviction::kLru, spilled));
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 2000; ++key) keys.push_back(key);
  const std::vector<float> values(2000 * kDim, 2.0f);
  table->Upsert(keys.data(), 2000, values.data(), {}, Pool());
  const Rows before = Contents(table.get());
  const RowSchema schema = table->schema();
  const std::vector<SlotSpec> had = table->slots();
  auto exporter = table->ExportMoment({});
  CHECK(!MustWaitFor(table.get(), had));
  CHECK(MustWaitFor(table.get(), {kSlot, kOther}) && table->slots() == had);
  std::thread slots([&] { table->EnsureSlots({kSlot, kOther}, Serial()); });
  std::thread clear([&] { table->Clear(); });
  std::thread writer([&] { table->Upsert(keys.data(), 500, values.data() + 6, {7, 7}, Serial()); });
  Rows rows;
  ReadInto(exporter.get(), schema, 50, Serial(), &rows, [] { std::this_thread::yield(); });
  CHECK(rows == before);
  slots.join();
  clear.join();
  writer.join();
  CHECK(table->slots().size() == 2 && table->Size() <= 500);
  CHECK(!MustWaitFor(table.get(), {kOther}) && table->slots().size() == 1);
}

}  // namespace
}  // namespace kvtable

int main() {
  using kvtable::Eviction;
  const auto make = [](int64_t max_capacity, Eviction eviction, bool spilled = false) {
    return kvtable::Table::Create(kvtable::Options(max_capacity, eviction, spilled));
  };
  // Some pieces of 512 bytes for 9 rows of 50,000, and their directories.
  kvtable::AnIncrementHoldsWhatChangedAndNoMore(make(0, Eviction::kLru).get(), 20000);
  kvtable::WhatIsNotKnownIsSaid(make(0, Eviction::kLru).get(), make(0, Eviction::kLru).get());
  for (uint64_t seed = 0; seed < 8; ++seed) {
    kvtable::IncrementsAreTheTable(make(0, Eviction::kLru).get(), seed);
    kvtable::IncrementsAreTheTable(make(0, Eviction::kLru, true).get(), seed);
    kvtable::IncrementsAreTheTable(make(250, Eviction::kLru).get(), seed);
    kvtable::IncrementsAreTheTable(make(300, Eviction::kLfu).get(), seed);
    kvtable::IncrementsAreTheTable(make(400, Eviction::kCustom).get(), seed);
  }
  kvtable::AMomentIsOneMoment(0);
  kvtable::AMomentIsOneMoment(0, true);
  kvtable::AMomentIsOneMoment(5000);
  kvtable::IncrementsBesideManyWritersAreTheTable(0);
  kvtable::IncrementsBesideManyWritersAreTheTable(2500, true);
  kvtable::IncrementsBesideManyWritersAreTheTable(2500);
  kvtable::RowsAsideAreBounded();
  kvtable::AnExportThatNobodyReadsIsGivenUp();
  kvtable::SlotsAndClearWaitForAMoment(0);
  kvtable::SlotsAndClearWaitForAMoment(0, true);
  kvtable::SlotsAndClearWaitForAMoment(3000);
}
