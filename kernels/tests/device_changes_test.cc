// What changed in a table in device memory, and exports of one moment of it, on threads or emulated warps: as on the CPU
// (changes_test.cc).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "../cuda/threads_table.h"
#include "check.h"
#include "increments.h"
#include "kvtable/device_table_view.h"
#include "kvtable/table.h"
#include "pool.h"
#include "throws.h"

namespace kvtable {
namespace {

std::shared_ptr<Table> Make(int64_t max_capacity, Eviction eviction, KeyType key_type = KeyType::kInt64,
                            int64_t max_hbm = INT64_MAX) {
  DeviceTableOptions options;
  options.name = "changing";
  options.key_type = key_type;
  options.dim = kDim;
  options.slots = {kSlot};
  options.initializer.a = 0.25;
  options.max_capacity = max_capacity;
  options.eviction = eviction;
  options.max_hbm = max_hbm;
  options.move_hot_rows = 64;
  return ViewOf(MakeThreadsTable(options, &Pool()), MakeThreadsWork(nullptr, &Pool()), ArraysIn::kHost);
}

std::vector<int64_t> Keys(int64_t n) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < n; ++key) keys.push_back(key);
  return keys;
}

// Rows that change places take what is known of their changes along.
void HotRowsTakeTheirErasAlong() {
  const auto table = Make(0, Eviction::kLru, KeyType::kInt64, int64_t{1} << 20);
  const int64_t n = 60000;  // 48 bytes each: most are in host memory
  const std::vector<int64_t> keys = Keys(n);
  const std::vector<float> values(static_cast<size_t>(n * kDim), 1.0f);
  table->Upsert(keys.data(), n, values.data(), {1, 1}, Pool());
  const uint64_t since = table->TrackChanges(1000);
  table->Upsert(keys.data() + n - 500, 500, values.data(), {1, 9}, Pool());  // hot rows now
  DeviceTableOf(table.get())->MoveHotRows(n, nullptr);
  const auto there = std::make_unique<bool[]>(500);
  DeviceTableOf(table.get())->InDeviceMemory({keys.data() + n - 500, 500}, there.get(), nullptr);
  CHECK(std::all_of(there.get(), there.get() + 500, [](bool is) { return is; }));
  table->Remove(keys.data() + 100, 3, Pool());
  MomentOptions options;
  options.since = since;
  const auto exporter = table->ExportMoment(options);
  Rows rows;
  ReadInto(exporter.get(), table->schema(), 333, Pool(), &rows, [] {});
  CHECK(rows.size() == 500 && rows.begin()->first == n - 500 && exporter->born_rows() == 0);
  CHECK((RemovedKeys(*exporter) == std::set<int64_t>{100, 101, 102}));
}

void KeysOf32BitsAreRemovedAsSuch() {
  const auto table = Make(0, Eviction::kLru, KeyType::kInt32);
  const std::vector<int32_t> keys = {-5, 7, INT32_MIN};
  const std::vector<float> values(keys.size() * kDim, 1.0f);
  table->Upsert(keys.data(), 3, values.data(), {}, Pool());
  MomentOptions options;
  options.since = table->TrackChanges(10);
  table->Remove(keys.data(), 3, Pool());
  table->Upsert(keys.data() + 1, 1, values.data(), {}, Pool());
  const auto exporter = table->ExportMoment(options);
  int32_t key = 0;
  Exporter::Buffers out;
  out.keys = &key;
  CHECK(exporter->Next(1, out, Pool()) == 1 && key == 7 && exporter->Next(1, out, Pool()) == 0);
  std::vector<int32_t> removed(2);
  CHECK(exporter->removed_rows() == 2);
  exporter->RemovedKeys(removed.data());
  CHECK((std::set<int32_t>(removed.begin(), removed.end()) == std::set<int32_t>{-5, INT32_MIN}));
}

// Whatever lets rows go is noted: tests of a pass, predicates, shrinking.
void EveryWayToGoIsNoted() {
  const auto table = Make(0, Eviction::kLru);
  const std::vector<int64_t> keys = Keys(1000);
  const std::vector<float> values(keys.size() * kDim, 1.0f);
  for (int64_t i = 0; i < 1000; i += 100) {
    table->Upsert(keys.data() + i, 100, values.data(), {1, static_cast<uint32_t>(i)}, Pool());
  }
  MomentOptions options;
  options.since = table->TrackChanges(1000);
  DeviceTable* const device = DeviceTableOf(table.get());
  device->RemoveIf({RowPredicate::Test::kVersionBelow, 200}, nullptr);  // 200 rows
  device->Shrink(500, ShrinkOrder::kOldest, nullptr);                   // 300 more
  CHECK(Evict(table.get(), {EvictPolicy::Kind::kKeepTop, 400, 0, RankBy::kVersion}, Pool()) == 100);
  CHECK(table->ExpiredCount() == 100 && table->EvictedCount() == 0);
  const auto exporter = table->ExportMoment(options);
  CHECK(exporter->max_rows() == 0 && exporter->removed_rows() == 600);
  const std::set<int64_t> removed = RemovedKeys(*exporter);
  CHECK(*removed.begin() == 0 && *removed.rbegin() == 599);
}

// A writer that goes round all keys waits until the rest of an export has been read, and lookups do not.
void WhoWritesWaitsForWhatIsLeft() {
  constexpr int64_t kCount = 20000;
  const auto table = Make(0, Eviction::kLru);
  const std::vector<int64_t> keys = Keys(kCount);
  const std::vector<float> zeros(kCount * kDim, 0.0f);
  const std::vector<float> ones(1000 * kDim, 1.0f);
  table->Upsert(keys.data(), kCount, zeros.data(), {}, Pool());
  const Rows before = Contents(table.get());
  MomentOptions options;
  options.aside = std::make_shared<AsideMemory>(200000);
  auto exporter = table->ExportMoment(options);
  CHECK(exporter->IsUrgent());
  std::atomic<int64_t> written{0};
  std::thread writer([&] {
    for (int64_t i = 0; i < kCount; i += 1000) {
      table->Upsert(keys.data() + i, 1000, ones.data(), {}, Serial());
      written += 1000;
    }
  });
  std::vector<float> read(1000 * kDim);
  table->Gather(keys.data(), 1000, read.data(), Missing::kZeros, nullptr, 0, nullptr, Serial());
  CHECK(read[0] == 0.0f && written == 0 && exporter->max_rows() == kCount);
  Rows rows;
  ReadInto(exporter.get(), table->schema(), 100, Serial(), &rows, [] { std::this_thread::yield(); });
  CHECK(rows == before);
  writer.join();
  CHECK(written == kCount);
  exporter.reset();
  CHECK(options.aside->used() == 0);
}

void AnExportThatNobodyReadsIsGivenUp() {
  const auto table = Make(0, Eviction::kLru);
  const std::vector<int64_t> keys = Keys(4000);
  const std::vector<float> values(4000 * kDim);
  table->Upsert(keys.data(), 4000, values.data(), {}, Pool());
  MomentOptions options;
  options.aside = std::make_shared<AsideMemory>(0, std::chrono::milliseconds(1));
  const auto exporter = table->ExportMoment(options);
  table->Upsert(keys.data(), 4000, values.data(), {}, Pool());  // would wait for ever
  int64_t key;
  Exporter::Buffers out;
  out.keys = &key;
  CHECK(Throws(ErrorCode::kFailedPrecondition, "given up", [&] {
    while (exporter->Next(1, out, Serial()) > 0) {
    }
  }));
  // One that goes before it was read lets writers on.
  options.aside = std::make_shared<AsideMemory>(0);
  auto dropped = table->ExportMoment(options);
  std::thread writer([&] { table->Upsert(keys.data(), 10, values.data(), {}, Serial()); });
  dropped.reset();
  writer.join();
}

// An export has the columns that rows had at its moment, and no others by their numbers.
void SlotsThatComeAfterTheMomentAreNotInIt() {
  const auto table = Make(0, Eviction::kLru);
  const std::vector<int64_t> keys = Keys(100);
  const std::vector<float> values(100 * kDim, 2.0f);
  table->Upsert(keys.data(), 100, values.data(), {}, Pool());
  const Rows before = Contents(table.get());
  const RowSchema schema = table->schema();
  const auto exporter = table->ExportMoment({});
  const auto late = table->ExportMoment({});
  const uint64_t generation = table->EnsureSlots({kOther}, Pool());
  Rows rows;
  ReadInto(exporter.get(), schema, 30, Pool(), &rows, [] {});
  CHECK(rows == before);
  float other[2];
  Exporter::Buffers out;
  out.columns = {{1, other, 2, generation}};
  CHECK(Throws(ErrorCode::kFailedPrecondition, "slots of table 'changing' changed",
               [&] { late->Next(1, out, Pool()); }));
}

// Increments that are cut while others write, at any moment: with every key that went and came.
void IncrementsBesideWritersAreTheTable(int64_t max_capacity) {
  const auto table = Make(max_capacity, Eviction::kLru);
  Random random(7);
  for (int i = 0; i < 20; ++i) WriteSomething(table.get(), &random, 3000);
  table->TrackChanges(1 << 20);
  std::atomic<bool> ended{false};
  std::thread writer([&] {
    Random own(11);
    while (!ended) WriteSomething(table.get(), &own, 3000);
  });
  MomentOptions options;
  options.cut = true;
  options.aside = std::make_shared<AsideMemory>(20000);
  Rows base;
  for (int round = 0; round < 15; ++round) {
    const auto exporter = table->ExportMoment(options);
    Rows changed;
    ReadInto(exporter.get(), table->schema(), 97, Serial(), &changed, [] {});
    ApplyIncrement(changed, RemovedKeys(*exporter), &base);
    options.since = exporter->version();
    table->ForgetChanges(exporter->version());
  }
  ended = true;
  writer.join();
  const auto last = table->ExportMoment(options);
  Rows changed;
  ReadInto(last.get(), table->schema(), 97, Serial(), &changed, [] {});
  ApplyIncrement(changed, RemovedKeys(*last), &base);
  CHECK(base == Contents(table.get()));
}

}  // namespace
}  // namespace kvtable

int main() {
#if defined(KVTABLE_TEST_FEW_ROUNDS)
  constexpr uint64_t kSeeds = 1;
#else
  constexpr uint64_t kSeeds = 4;
#endif
  using kvtable::Eviction;
  using kvtable::Make;
  // The lookup of 50,000 keys makes room for as many more rows, of 16 bytes each: stamps, and what changed.
  kvtable::AnIncrementHoldsWhatChangedAndNoMore(Make(0, Eviction::kLru).get(), 16 * 60000);
  kvtable::WhatIsNotKnownIsSaid(Make(0, Eviction::kLru).get(), Make(0, Eviction::kLru).get());
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    kvtable::IncrementsAreTheTable(Make(0, Eviction::kLru).get(), seed);
    kvtable::IncrementsAreTheTable(Make(250, Eviction::kLru).get(), seed);
    kvtable::IncrementsAreTheTable(Make(300, Eviction::kLfu).get(), seed);
    kvtable::IncrementsAreTheTable(Make(400, Eviction::kCustom).get(), seed);
  }
  kvtable::HotRowsTakeTheirErasAlong();
  kvtable::KeysOf32BitsAreRemovedAsSuch();
  kvtable::EveryWayToGoIsNoted();
  kvtable::WhoWritesWaitsForWhatIsLeft();
  kvtable::AnExportThatNobodyReadsIsGivenUp();
  kvtable::SlotsThatComeAfterTheMomentAreNotInIt();
  kvtable::IncrementsBesideWritersAreTheTable(0);
  kvtable::IncrementsBesideWritersAreTheTable(2500);
}
