// Rows that change places between device and host memory, on threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "../cuda/threads_table.h"
#include "base/hash.h"
#include "check.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "pool.h"

namespace kvtable {
namespace {

constexpr int64_t kDim = 512;           // 2 KiB: 512 rows a slab
constexpr int64_t kInDevice = 2 * 512;  // rows

std::unique_ptr<DeviceTable> Make(ValueType type, int64_t move_hot_rows) {
  DeviceTableOptions options;
  options.name = "hot";
  options.value_type = type;
  options.dim = kDim * 4 / SizeOf(type) - 1;
  options.slots = {{"count", 1, SlotSpec::Init::kConstant, 0.0}};
  options.max_hbm = int64_t{2} << 20;
  options.move_hot_rows = move_hot_rows;
  return MakeThreadsTable(options, &Pool());
}

int64_t KeyOf(size_t i) {
  if (i == 0) return std::numeric_limits<int64_t>::min();
  if (i == 1) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(i) * 977;
}

std::vector<int64_t> Keys(size_t n) {
  std::vector<int64_t> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = KeyOf(i);
  return keys;
}

DeviceKeys Batch(const std::vector<int64_t>& keys) {
  return {keys.data(), static_cast<int64_t>(keys.size()), true};
}

float InitialOf(int64_t key) { return static_cast<float>(key % 1000); }

size_t ValueBytes(ValueType type) { return static_cast<size_t>(kDim * 4 - SizeOf(type)); }

// Rows of bytes that say which key they are of.
std::vector<uint8_t> RowsOf(size_t n, size_t bytes) {
  std::vector<uint8_t> rows(n * bytes);
  for (size_t i = 0; i < n; ++i) {
    for (size_t b = 0; b < bytes; ++b) rows[i * bytes + b] = static_cast<uint8_t>(Mix64(i * 3 + b / 7));
  }
  return rows;
}

std::vector<char> InDevice(DeviceTable* table, const std::vector<int64_t>& keys) {
  const auto flags = std::make_unique<bool[]>(keys.size());
  table->InDeviceMemory(Batch(keys), flags.get(), nullptr);
  return std::vector<char>(flags.get(), flags.get() + keys.size());
}

// With all stamps different, it is known to the row which move.
void TheHottestMoveUpAndTheColdestDown(ValueType type, int64_t most) {
  const size_t n = 3000;
  const auto table = Make(type, 0);
  const std::vector<int64_t> keys = Keys(n);
  const size_t bytes = ValueBytes(type);
  const std::vector<uint8_t> rows = RowsOf(n, bytes);
  std::vector<uint32_t> freqs(n);
  std::vector<uint32_t> versions(n);
  std::vector<std::pair<uint64_t, size_t>> order(n);  // coldest first
  for (size_t i = 0; i < n; ++i) {
    freqs[i] = static_cast<uint32_t>(i);
    versions[i] = static_cast<uint32_t>(Mix64(i) % 50);
    order[i] = {uint64_t{versions[i]} << 32 | freqs[i], i};
  }
  std::sort(order.begin(), order.end());
  for (size_t begin = 0; begin < n; begin += 500) {
    table->Import({&keys[begin], 500, true}, {{0, &rows[begin * bytes], table->options().dim}}, &freqs[begin],
                  &versions[begin], nullptr, nullptr);
  }
  CHECK(table->Memory().host_bytes > 0);
  const std::vector<char> before = InDevice(table.get(), keys);
  CHECK(std::count(before.begin(), before.end(), 1) == kInDevice);
  table->MoveHotRows(most, nullptr);
  const std::vector<char> after = InDevice(table.get(), keys);

  // The last kInDevice of the order are to be in device memory: those that are not move, the hottest first.
  std::vector<char> expected = before;
  std::vector<size_t> up;
  std::vector<size_t> down;
  for (size_t o = 0; o < n; ++o) {
    const size_t i = order[o].second;
    if (o + kInDevice < n && before[i] != 0) down.push_back(i);
    if (o + kInDevice >= n && before[i] == 0) up.push_back(i);
  }
  CHECK(up.size() == down.size());
  const size_t moved = std::min(up.size(), static_cast<size_t>(most));
  for (size_t m = 0; m < moved; ++m) {
    expected[up[up.size() - 1 - m]] = 1;
    expected[down[m]] = 0;
  }
  CHECK(after == expected);
  std::vector<uint8_t> out(rows.size());
  std::vector<uint32_t> stamps[2] = {std::vector<uint32_t>(n), std::vector<uint32_t>(n)};
  table->Gather(Batch(keys), out.data(), Missing::kZeros, nullptr, 0, nullptr, nullptr);
  table->GatherStamps(Batch(keys), stamps[0].data(), stamps[1].data(), nullptr);
  CHECK(out == rows && stamps[0] == freqs && stamps[1] == versions);
}

void EqualStampsMoveNothing() {
  const auto table = Make(ValueType::kFloat32, 0);
  const std::vector<int64_t> keys = Keys(3000);
  table->Import(Batch(keys), {}, nullptr, nullptr, nullptr, nullptr);
  const std::vector<char> before = InDevice(table.get(), keys);
  table->MoveHotRows(INT64_MAX, nullptr);
  CHECK(InDevice(table.get(), keys) == before);
}

void MarksOfZeroRowsGoAlong() {
  const size_t n = 2000;
  const auto table = Make(ValueType::kFloat32, 0);
  const std::vector<int64_t> keys = Keys(n);
  const size_t bytes = ValueBytes(ValueType::kFloat32);
  std::vector<uint8_t> rows = RowsOf(n, bytes);
  std::vector<uint32_t> versions(n);
  for (size_t i = 0; i < n; ++i) {
    versions[i] = static_cast<uint32_t>(Mix64(i) % 9);
    if (i % 3 == 0) std::fill_n(&rows[i * bytes], bytes, uint8_t{0});
  }
  table->Import(Batch(keys), {{0, rows.data(), table->options().dim}}, nullptr, versions.data(), nullptr,
                nullptr);
  const std::vector<char> before = InDevice(table.get(), keys);
  table->MoveHotRows(INT64_MAX, nullptr);
  CHECK(InDevice(table.get(), keys) != before);
  const auto zeroed = std::make_unique<bool[]>(n);
  table->Zeroed(Batch(keys), zeroed.get(), nullptr);
  for (size_t i = 0; i < n; ++i) CHECK(zeroed[i] == (i % 3 == 0));
  CHECK(table->ZeroedRows() == static_cast<int64_t>((n + 2) / 3));
}

// Of batches in which few keys are most of the occurrences, those keys' rows come to device memory, although
// they were inserted last; and a pointer holds until the next batch.
void HotKeysOfATableThatTrainsLieInDeviceMemory(bool steps) {
  const size_t n = 8000;
  const auto table = Make(ValueType::kFloat32, 64);
  std::vector<int64_t> keys = Keys(n);
  std::reverse(keys.begin(), keys.end());
  std::vector<float> rows;
  for (const int64_t key : keys) rows.insert(rows.end(), kDim - 1, InitialOf(key));
  for (size_t begin = 0; begin < n; begin += 1000) {
    table->Upsert({&keys[begin], 1000, true}, &rows[begin * (kDim - 1)], {0, 0}, nullptr);
  }
  std::reverse(keys.begin(), keys.end());
  const std::vector<int64_t> hot(keys.begin(), keys.begin() + 300);
  const std::vector<char> before = InDevice(table.get(), hot);
  CHECK(std::count(before.begin(), before.end(), 1) == 0);
  uint64_t state = 1;
  std::vector<int64_t> batch(400);
  const std::vector<float> ones(batch.size(), 1.0f);
  for (uint32_t step = 1; step <= 600; ++step) {
    for (int64_t& key : batch) {
      const double u = static_cast<double>(Mix64(++state) >> 11) / 9007199254740992.0;
      key = KeyOf(static_cast<size_t>(std::pow(static_cast<double>(n), u)) - 1);  // density 1 / rank
    }
    table->UpsertColumns({batch.data(), 400, false}, {{1, ones.data(), 1}}, {1, steps ? step / 16 : 0},
                         nullptr);
  }
  const std::vector<char> after = InDevice(table.get(), hot);
  CHECK(std::count(after.begin(), after.end(), 1) >= 285);
  std::vector<void*> pointers(hot.size());
  table->PointersOrInsert(Batch(hot), pointers.data(), {1, 600}, nullptr, nullptr);
  for (size_t i = 0; i < hot.size(); ++i) {
    const float* const values = static_cast<float*>(pointers[i]);
    CHECK(values[0] == InitialOf(hot[i]) && values[kDim - 2] == values[0] && values[kDim - 1] == 1.0f);
  }
}

// A bounded table with rows in host memory that change places, beside one whose rows do not: the same rows
// are left, with the same scores.
void EvictionsAreTheSameWhereverRowsLie(Eviction eviction) {
  uint64_t now = 1000000;
  DeviceTableOptions options;
  options.name = "bounded";
  options.dim = kDim;
  options.max_capacity = 1600;
  options.eviction = eviction;
  options.clock = [&now] { return now; };
  const auto still = MakeThreadsTable(options, &Pool());
  options.max_hbm = int64_t{2} << 20;
  options.move_hot_rows = 30;
  const auto moving = MakeThreadsTable(options, &Pool());
  uint64_t state = 9;
  const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
  for (uint32_t step = 0; step < 60; ++step) {
    now += next(3) * 700000;
    std::vector<int64_t> keys(1 + next(500));
    std::vector<float> rows;
    std::vector<uint64_t> scores;
    for (int64_t& key : keys) {
      key = KeyOf(next(next(2) == 0 ? 500 : 4000));
      rows.insert(rows.end(), kDim, static_cast<float>(next(100)));
      scores.push_back(next(1000));
    }
    const DeviceKeys batch{keys.data(), static_cast<int64_t>(keys.size()), false};
    const uint64_t kind = next(4);
    for (DeviceTable* const table :
         {static_cast<DeviceTable*>(still.get()), static_cast<DeviceTable*>(moving.get())}) {
      if (kind == 0) {
        std::vector<float> out(rows.size());
        table->GatherOrInsert(batch, out.data(), {1, step}, nullptr, nullptr);
      } else {
        table->Upsert(batch, rows.data(), {1, step}, nullptr);
      }
      if (eviction == Eviction::kCustom) table->SetScores(batch, scores.data(), nullptr);
      if (kind == 2) table->Remove({keys.data(), batch.n / 4, false}, nullptr);
    }
    if (kind == 3) moving->MoveHotRows(200, nullptr);
    std::vector<int64_t> all = Keys(4000);
    std::vector<float> values[2];
    std::vector<uint64_t> of_rows[2];
    int side = 0;
    for (DeviceTable* const table :
         {static_cast<DeviceTable*>(still.get()), static_cast<DeviceTable*>(moving.get())}) {
      const std::vector<int64_t>& some = step % 10 == 9 ? all : keys;
      values[side].resize(some.size() * kDim);
      of_rows[side].resize(some.size());
      table->Gather(Batch(some), values[side].data(), Missing::kZeros, nullptr, 0, nullptr, nullptr);
      table->Scores(Batch(some), of_rows[side].data(), nullptr);
      ++side;
    }
    CHECK(still->Size() == moving->Size() && values[0] == values[1] && of_rows[0] == of_rows[1]);
  }
  CHECK(moving->EvictedCount() > 0 && moving->EvictedCount() == still->EvictedCount());
  CHECK(moving->Memory().host_bytes > 0);
}

void NothingMovesUnlessAskedTo() {
  const auto table = Make(ValueType::kFloat32, 0);
  const std::vector<int64_t> keys = Keys(3000);
  std::vector<float> rows(keys.size() * kDim);
  table->GatherOrInsert(Batch(keys), rows.data(), {}, nullptr, nullptr);
  const std::vector<char> before = InDevice(table.get(), keys);
  const std::vector<int64_t> last(keys.end() - 500, keys.end());
  for (uint32_t step = 1; step < 40; ++step) {
    table->GatherOrInsert(Batch(last), rows.data(), {1, step}, nullptr, nullptr);
    table->Upsert(Batch(last), rows.data(), {1, step}, nullptr);
  }
  CHECK(InDevice(table.get(), keys) == before);
  // And nothing can where all rows are in device memory, or none is, or there is no row.
  for (const int64_t max_hbm : {int64_t{0}, INT64_MAX}) {
    DeviceTableOptions options;
    options.dim = 1;
    options.max_hbm = max_hbm;
    const auto other = MakeThreadsTable(options, &Pool());
    other->MoveHotRows(10, nullptr);
    other->GatherOrInsert(Batch(keys), rows.data(), {}, nullptr, nullptr);
    other->MoveHotRows(10, nullptr);
    const std::vector<char> flags = InDevice(other.get(), keys);
    CHECK(std::count(flags.begin(), flags.end(), 1) == (max_hbm == 0 ? 0 : 3000));
    CHECK(InDevice(other.get(), {5}) == std::vector<char>{0});
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  using kvtable::Eviction;
  using kvtable::ValueType;
#if defined(KVTABLE_TEST_FEW_ROUNDS)
  const std::vector<int64_t> numbers = {100};
  const std::vector<Eviction> evictions = {Eviction::kLfu};
#else
  const std::vector<int64_t> numbers = {0, 1, 100, INT64_MAX};
  const std::vector<Eviction> evictions = {Eviction::kLru, Eviction::kLfu, Eviction::kCustom};
#endif
  for (const int64_t most : numbers) {
    kvtable::TheHottestMoveUpAndTheColdestDown(ValueType::kFloat32, most);
    kvtable::TheHottestMoveUpAndTheColdestDown(ValueType::kInt8, most);
  }
  kvtable::EqualStampsMoveNothing();
  kvtable::MarksOfZeroRowsGoAlong();
  kvtable::HotKeysOfATableThatTrainsLieInDeviceMemory(true);
  kvtable::HotKeysOfATableThatTrainsLieInDeviceMemory(false);
  for (const Eviction eviction : evictions) kvtable::EvictionsAreTheSameWhereverRowsLie(eviction);
  kvtable::NothingMovesUnlessAskedTo();
  return 0;
}
