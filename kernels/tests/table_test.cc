// What a table promises beside its rows: removal in linear time, slots that change for all rows or for none,
// columns that are those that were looked up, initial values that its type can hold.
#include "kvtable/table.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/parallel_for.h"
#include "throws.h"

namespace kvtable {
namespace {

std::unique_ptr<Table> MakeTable(std::vector<SlotSpec> slots, int shards) {
  TableOptions options;
  options.dim = 1;
  options.slots = std::move(slots);
  options.shards = shards;
  return Table::Create(options);
}

SlotSpec Slot(const char* name, double constant, int64_t width = 1) {
  return {name, width, SlotSpec::Init::kConstant, constant};
}

std::vector<int64_t> Keys(int64_t n) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(i);
  return keys;
}

void Insert(Table* table, const std::vector<int64_t>& keys) {
  const std::vector<float> values(keys.size(), 0.5f);
  table->Upsert(keys.data(), static_cast<int64_t>(keys.size()), values.data(), {}, Serial());
}

// Each time the list of free rows gets longer memory it is copied. So removals take linear time only where
// that happens few times.
void RemovedRowsAreListedWithoutCopyingTheListEachTime() {
  for (const int64_t max_capacity : {int64_t{0}, int64_t{50000}}) {
    TableOptions options;
    options.dim = 1;
    options.shards = 1;
    options.max_capacity = max_capacity;
    const auto table = Table::Create(options);
    const std::vector<int64_t> keys = Keys(20000);
    Insert(table.get(), keys);
    int times = 0;
    int64_t bytes = table->Memory().column_bytes;
    for (const int64_t key : keys) {
      CHECK(table->Remove(&key, 1, Serial()) == 1);
      const int64_t now = table->Memory().column_bytes;
      times += now != bytes ? 1 : 0;
      bytes = now;
    }
    CHECK(times < 50);
    CHECK(table->Size() == 0);
  }
}

// For how long it lives, the process gets no more than `bytes` of address space.
class AddressSpaceLeft {
 public:
  explicit AddressSpaceLeft(rlim_t bytes) {
    CHECK(::getrlimit(RLIMIT_AS, &before_) == 0);
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    CHECK(pages > 0);
    Set(pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + bytes);
  }
  ~AddressSpaceLeft() { Set(before_.rlim_cur); }

 private:
  void Set(rlim_t bytes) const {
    const rlimit limit{bytes, before_.rlim_max};
    CHECK(::setrlimit(RLIMIT_AS, &limit) == 0);
  }
  rlimit before_;
};

// The rows of one shard, 2 GiB, cannot be made as wide as asked for. The shard before has no rows, and could.
void SlotsThatOneShardHasNoMemoryForChangeNoShard() {
  TableOptions options;
  options.dim = 1;
  options.shards = 2;
  options.slots = {Slot("kept", 3.0)};
  const auto table = Table::Create(options);
  std::vector<int64_t> keys = Keys(64);
  std::vector<uint64_t> positions(keys.size());
  Insert(table.get(), keys);
  table->Locate(keys.data(), 64, positions.data(), Serial());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (positions[i] >> 32 == 0) table->Remove(&keys[i], 1, Serial());
  }
  const auto refilled = Table::Create(options);  // whose first shard never had a row
  for (size_t i = 0; i < keys.size(); ++i) {
    if (positions[i] >> 32 == 1) Insert(refilled.get(), {keys[i]});
  }
  for (Table* each : {table.get(), refilled.get()}) {
    const std::vector<SlotSpec> wide = {Slot("kept", 3.0), Slot("wide", 1.0, int64_t{1} << 24)};
    {
      const AddressSpaceLeft left(rlim_t{512} << 20);
      CHECK(Throws(ErrorCode::kResourceExhausted, [&] { each->EnsureSlots(wide, Serial()); }));
    }
    CHECK(each->generation() == 1 && each->slots() == options.slots);
    Insert(each, keys);
    CHECK(each->Memory().row_bytes == 64 * 2 * 4);  // in every shard
    std::vector<float> kept(keys.size());
    each->GatherColumns(keys.data(), 64, {{1, kept.data(), 1, 1}}, nullptr, Serial());
    for (const float x : kept) CHECK(x == 3.0f);
    CHECK(each->EnsureSlots({Slot("other", 4.0), Slot("kept", 3.0)}, Serial()) == 2);
    each->GatherColumns(keys.data(), 64, {{2, kept.data(), 1, 2}}, nullptr, Serial());
    for (const float x : kept) CHECK(x == 3.0f);
    CHECK(each->Memory().row_bytes == 64 * 3 * 4);
  }
}

// `table` had the slots "a" and "b", which changed to `slots`. Whether every operation on column `column`, as
// it was numbered before, is refused, and leaves `slots` as they start.
bool IsRefused(const std::vector<SlotSpec>& slots, int column) {
  const auto table = MakeTable({Slot("a", 1.0), Slot("b", 2.0)}, 4);
  const std::vector<int64_t> keys = Keys(100);
  Insert(table.get(), keys);
  const uint64_t generation = table->schema().generation;
  const auto exporter = table->Export();
  table->EnsureSlots(slots, Serial());
  std::vector<float> rows(keys.size(), 9.0f);
  const auto refused = [&](const auto& operation) {
    return Throws(ErrorCode::kFailedPrecondition, "have changed since", operation);
  };
  const std::vector<ColumnIn> in = {{column, rows.data(), 1, generation}};
  const Update update = MakeUpdate("momentum", {{"learning_rate", 0.5}});
  const bool first = refused([&] {
    table->GatherColumns(keys.data(), 100, {{column, rows.data(), 1, generation}}, nullptr, Serial());
  });
  const auto same = [&](const auto& operation) { CHECK(refused(operation) == first); };
  if (first) {  // else these would change what the rest looks at
    same([&] { table->UpsertColumns(keys.data(), 100, in, {}, Serial()); });
    same([&] { table->Import(keys.data(), 100, in, nullptr, nullptr, nullptr, Serial()); });
    same([&] {
      table->Apply(keys.data(), nullptr, 100, rows.data(), update, {{column}, generation}, {}, Serial());
    });
  }
  Exporter::Buffers out;
  out.columns = {{column, rows.data(), 1, generation}};
  same([&] { exporter->Next(100, out, Serial()); });
  for (size_t s = 0; s < slots.size(); ++s) {
    std::vector<float> now(keys.size());
    table->GatherColumns(keys.data(), 100, {{static_cast<int>(s) + 1, now.data(), 1}}, nullptr, Serial());
    for (const float x : now) CHECK(x == static_cast<float>(slots[s].constant));
  }
  return first;
}

void ColumnsAreThoseThatWereLookedUp() {
  CHECK(IsRefused({Slot("b", 2.0)}, 1));                  // "b" has come to the place of "a"
  CHECK(IsRefused({Slot("b", 2.0)}, 2));                  // none is there
  CHECK(IsRefused({Slot("a", 1.0), Slot("c", 3.0)}, 2));  // another one
  CHECK(IsRefused({}, 1));
  CHECK(!IsRefused({Slot("a", 1.0), Slot("c", 3.0)}, 1));  // still there
  CHECK(!IsRefused({Slot("a", 1.0)}, 1));
  CHECK(!IsRefused({Slot("b", 2.0), Slot("a", 1.0)}, 0));  // the value always is
  // Gone and come again is another slot.
  const auto table = MakeTable({Slot("a", 1.0)}, 1);
  table->EnsureSlots({}, Serial());
  CHECK(table->EnsureSlots({Slot("a", 1.0)}, Serial()) == 3);
  const int64_t key = 0;
  float row = 0;
  CHECK(Throws(ErrorCode::kFailedPrecondition,
               [&] { table->GatherColumns(&key, 1, {{1, &row, 1, 1}}, nullptr, Serial()); }));
  table->GatherColumns(&key, 1, {{1, &row, 1, table->schema().generation}}, nullptr, Serial());
}

// Runs the first task, has another thread do something, and then runs the other tasks.
class Interrupted : public ParallelFor {
 public:
  explicit Interrupted(std::function<void()> meanwhile) : meanwhile_(std::move(meanwhile)) {}
  ~Interrupted() override { other_.join(); }

  int threads() const override { return 2; }

  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override {
    body(0);
    other_ = std::thread([this] {
      meanwhile_();
      done_ = true;
    });
    for (int i = 0; i < 100000 && !done_; ++i) std::this_thread::yield();  // or it waits for this batch
    Serial().Run(tasks - 1, [&](int64_t task) { body(task + 1); });
  }

 private:
  const std::function<void()> meanwhile_;
  std::atomic<bool> done_{false};
  std::thread other_;
};

// A batch that writes slots, and a thread that drops them when its first shard is written.
void SlotsThatAreDroppedBetweenShardsAreWrittenInAllOrInNone() {
  const std::vector<int64_t> keys = Keys(100);
  const std::vector<float> rows(keys.size(), 1.0f);
  const Update update = MakeUpdate("momentum", {{"learning_rate", 0.5}, {"momentum", 0.0}});
  for (const bool step : {true, false}) {
    const auto table = MakeTable({Slot("a", 1.0)}, 4);
    Insert(table.get(), keys);
    const uint64_t generation = table->schema().generation;
    const auto write = [&](ParallelFor* threads) {
      if (step) {
        table->Apply(keys.data(), nullptr, 100, rows.data(), update, {{1}, generation}, {}, *threads);
      } else {
        table->UpsertColumns(keys.data(), 100,
                             {{0, rows.data(), 1, generation}, {1, rows.data(), 1, generation}}, {},
                             *threads);
      }
    };
    const auto written = [&] {
      std::vector<float> values(keys.size());
      table->Gather(keys.data(), 100, values.data(), Missing::kZeros, nullptr, 0, nullptr, Serial());
      return 100 - std::count(values.begin(), values.end(), 0.5f);
    };
    bool refused = false;
    {
      Interrupted threads([&] { table->EnsureSlots({}, Serial()); });
      refused = Throws(ErrorCode::kFailedPrecondition, "have changed since", [&] { write(&threads); });
    }
    CHECK(table->slots().empty());
    CHECK(written() == (refused ? 0 : 100));
    Insert(table.get(), keys);
    CHECK(Throws(ErrorCode::kFailedPrecondition, "have changed since", [&] { write(&Serial()); }));
    CHECK(written() == 0);
  }
}

// Keys that were exported and removed, and come again in rows that are still to be read.
void NoKeyIsExportedTwice() {
  const auto table = MakeTable({}, 1);
  const std::vector<int64_t> keys = Keys(1000);
  Insert(table.get(), keys);
  std::set<int64_t> exported;
  std::vector<int64_t> chunk(100);
  Exporter::Buffers out;
  out.keys = chunk.data();
  const auto exporter = table->Export();
  auto other = table->Export();  // two at a time, of which one ends early
  const auto next = [&] {
    const int64_t n = exporter->Next(100, out, Serial());
    for (int64_t i = 0; i < n; ++i) CHECK(exported.insert(chunk[static_cast<size_t>(i)]).second);
    return n;
  };
  CHECK(next() == 100);
  other.reset();
  const std::vector<int64_t> first(exported.begin(), exported.end());
  std::vector<int64_t> rest;
  for (const int64_t key : keys) {
    if (exported.count(key) == 0) rest.push_back(key);
  }
  table->Remove(first.data(), 100, Serial());
  table->Remove(&rest[300], 200, Serial());
  Insert(table.get(), first);  // in rows of those
  while (next() > 0) {
  }
  CHECK(exported.size() == 800);
  std::vector<int64_t> all(2000);
  out.keys = all.data();
  CHECK(table->Export()->Next(2000, out, Serial()) == 800);  // a new one gives what is there now
}

void InitialValuesThatAreNoneOfTheTypeAreRefused() {
  for (const ValueType type : {ValueType::kInt8, ValueType::kInt32, ValueType::kInt64, ValueType::kBool}) {
    TableOptions options;
    options.dim = 2;
    options.value_type = type;
    for (const auto kind :
         {Initializer::Kind::kUniform, Initializer::Kind::kNormal, Initializer::Kind::kTruncatedNormal}) {
      options.initializer.kind = kind;
      options.initializer.b = 1.0;
      CHECK(Throws(ErrorCode::kInvalidArgument, "integer or bool", [&] { Table::Create(options); }));
    }
    options.initializer = {};
    for (const double constant : {0.5, 1e300, -1e300, 0.0 / 0.0}) {
      options.initializer.a = constant;
      CHECK(Throws(ErrorCode::kInvalidArgument, "integer or bool", [&] { Table::Create(options); }));
    }
    options.initializer.a = 1.0;
    const auto table = Table::Create(options);
    const Initializer normal{Initializer::Kind::kNormal, 0.0, 1.0, 0, nullptr, 0};
    CHECK(Throws(ErrorCode::kInvalidArgument, [&] { table->SetInitializer(normal); }));
    CHECK(Throws(ErrorCode::kInvalidArgument, [&] { table->EnsureSlots({Slot("s", 0.5)}, Serial()); }));
    std::vector<char> row(2 * 8);
    const int64_t key = 7;
    table->GatherOrInsert(&key, 1, row.data(), {}, nullptr, Serial());
    CHECK(row[0] == 1 && row[static_cast<size_t>(SizeOf(type))] == 1);
  }
  TableOptions options;
  options.dim = 1;
  options.value_type = ValueType::kInt8;
  for (const double constant : {-128.0, 127.0}) {
    options.initializer.a = constant;
    Table::Create(options);
  }
  for (const double constant : {-129.0, 128.0}) {
    options.initializer.a = constant;
    CHECK(Throws(ErrorCode::kInvalidArgument, [&] { Table::Create(options); }));
  }
}

// Keys at home in the first and in the last bucket, so many that they fill the buckets after it, also from the last one on
// to the first ones.
void KeysFarFromTheirHomeAreFound() {
  std::vector<int64_t> keys;
  std::vector<int64_t> absent;
  for (int64_t key = 0; keys.size() < 300 || absent.size() < 100; ++key) {
    const uint32_t low = static_cast<uint32_t>(Mix64(static_cast<uint64_t>(key)));
    if (low >= uint32_t{1} << 21 && low < ~uint32_t{0} - (uint32_t{1} << 21)) continue;
    (keys.size() < 300 ? keys : absent).push_back(key);
  }
  const auto table = MakeTable({}, 1);
  std::vector<float> values;
  for (const int64_t key : keys) values.push_back(static_cast<float>(key % 1000));
  table->Upsert(keys.data(), 300, values.data(), {}, Serial());
  std::vector<int64_t> wanted;
  const auto check = [&](int64_t gone) {
    wanted.clear();
    for (size_t i = 0; i < keys.size(); ++i) {
      wanted.push_back(keys[i]);
      if (i % 3 == 0) wanted.push_back(absent[i / 3]);
    }
    std::vector<float> rows(wanted.size());
    const std::unique_ptr<bool[]> found(new bool[wanted.size()]);
    table->Gather(wanted.data(), static_cast<int64_t>(wanted.size()), rows.data(), Missing::kZeros, nullptr,
                  0, found.get(), Serial());
    for (size_t w = 0; w < wanted.size(); ++w) {
      const auto at = std::find(keys.begin() + gone, keys.end(), wanted[w]);
      CHECK(found[w] == (at != keys.end()));
      CHECK(rows[w] == (found[w] ? values[static_cast<size_t>(at - keys.begin())] : 0.0f));
    }
  };
  check(0);
  table->Remove(keys.data(), 150, Serial());
  check(150);
}

// The shards of all parts of a variable are as many as those of one table, or a little more; never fewer.
void PartsOfOneVariableShareOutItsShards() {
  const auto shards_of = [](int64_t parts_beside) {
    TableOptions options;
    options.dim = 1;
    options.parts_beside = parts_beside;
    const auto table = Table::Create(options);
    const std::vector<int64_t> keys = Keys(10000);
    Insert(table.get(), keys);
    std::vector<float> rows(keys.size());
    std::vector<uint64_t> positions(keys.size());
    table->Gather(keys.data(), 10000, RowsOut(rows.data(), positions.data()), Missing::kZeros, nullptr, 0,
                  nullptr, Serial());
    std::set<uint64_t> shards;
    for (const uint64_t position : positions) shards.insert(position >> 32);
    return static_cast<int64_t>(shards.size());
  };
  const int64_t whole = shards_of(1);
  CHECK(whole >= 8);
  CHECK(shards_of(INT64_MAX) == 2 && shards_of(INT64_MIN) == whole);
  for (const int64_t parts : {2, 3, 5, 8, 100}) {
    const int64_t shards = shards_of(parts);
    CHECK(shards >= 2 && shards * parts >= whole);
    // More than one table's where that has as many as there can be: on a machine of many processors.
    CHECK(whole == 64 || shards == 2 || shards * parts < 2 * whole);
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::KeysFarFromTheirHomeAreFound();
  kvtable::PartsOfOneVariableShareOutItsShards();
  kvtable::RemovedRowsAreListedWithoutCopyingTheListEachTime();
  kvtable::SlotsThatOneShardHasNoMemoryForChangeNoShard();
  kvtable::NoKeyIsExportedTwice();
  kvtable::ColumnsAreThoseThatWereLookedUp();
  kvtable::SlotsThatAreDroppedBetweenShardsAreWrittenInAllOrInNone();
  kvtable::InitialValuesThatAreNoneOfTheTypeAreRefused();
  return 0;
}
