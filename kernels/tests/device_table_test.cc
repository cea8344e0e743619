// The table in device memory against a map: on CPU threads, where the sanitizers see the same code that runs
// on a GPU; and, compiled with KVTABLE_TEST_CUDA, on a GPU.
#include "kvtable/device_table.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "device_arrays.h"
#include "kvtable/parallel_for.h"
#include "pool.h"
#include "throws.h"
#include "values/initial_value.h"

#if defined(KVTABLE_TEST_CUDA)
#include <cuda_runtime.h>
#else
#include "../cuda/threads_table.h"
#endif

namespace kvtable {
namespace {

#if defined(KVTABLE_TEST_CUDA)
std::unique_ptr<DeviceTable> Make(const DeviceTableOptions& options) { return MakeCudaTable(options); }

template <class T>
void Read(T* to, const void* row) {
  CHECK(cudaMemcpy(to, row, sizeof(T), cudaMemcpyDefault) == cudaSuccess);
}
#else
std::unique_ptr<DeviceTable> Make(const DeviceTableOptions& options, size_t memory = SIZE_MAX) {
  return MakeThreadsTable(options, &Pool(), memory);
}

template <class T>
void Read(T* to, const void* row) {
  std::memcpy(to, row, sizeof(T));
}
#endif

constexpr int64_t kExtremes[] = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), 0,
                                 -1, 1};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next(uint64_t below) { return Mix64(++state_) % below; }

 private:
  uint64_t state_;
};

DeviceKeys Batch(const Array<int64_t>& keys) {
  return {keys.data(), static_cast<int64_t>(keys.size()), false};
}

// ---- Against a map

constexpr int64_t kDim = 3;
constexpr float kInitial = 0.25f;

struct ModelRow {
  float value = kInitial;  // of each column
  float copy = kInitial;   // the slot that starts as a copy of the value
  uint32_t frequency = 0;
  uint32_t version = 0;
};
using Model = std::unordered_map<int64_t, ModelRow>;

DeviceTableOptions ModelOptions() {
  DeviceTableOptions options;
  options.name = "model";
  options.dim = kDim;
  options.initializer.a = kInitial;
  options.slots = {{"copy", kDim, SlotSpec::Init::kCopyValue, 0.0}, {"m", 2, SlotSpec::Init::kConstant, 7.0}};
  options.max_hbm = int64_t{4} << 20;
  return options;
}

void Agree(DeviceTable* table, const Model& model, Random* random) {
  CHECK(table->Size() == static_cast<int64_t>(model.size()));
  // What an export gives, in chunks of changing sizes.
  Model exported;
  const auto exporter = table->Export({});
  for (;;) {
    const size_t capacity = 1 + random->Next(3000);
    Array<int64_t> keys(capacity);
    Array<uint32_t> freqs(capacity);
    Array<uint32_t> versions(capacity);
    Array<float> values(capacity * kDim);
    Array<float> copies(capacity * kDim);
    Array<float> constants(capacity * 2);
    DeviceExporter::Buffers out;
    out.keys = keys.data();
    out.freqs = freqs.data();
    out.versions = versions.data();
    out.columns = {{0, values.data(), kDim}, {1, copies.data(), kDim}, {2, constants.data(), 2}};
    const int64_t n = exporter->Next(static_cast<int64_t>(capacity), out, nullptr);
    if (n == 0) break;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      for (size_t j = 1; j < kDim; ++j) {
        CHECK(values[i * kDim + j] == values[i * kDim] && copies[i * kDim + j] == copies[i * kDim]);
      }
      CHECK(constants[2 * i] == 7.0f && constants[2 * i + 1] == 7.0f);
      const ModelRow row{values[i * kDim], copies[i * kDim], freqs[i], versions[i]};
      CHECK(exported.emplace(keys[i], row).second);
    }
  }
  CHECK(exported.size() == model.size());
  for (const auto& [key, row] : model) {
    const auto it = exported.find(key);
    CHECK(it != exported.end());
    CHECK(it->second.value == row.value && it->second.copy == row.copy);
    CHECK(it->second.frequency == row.frequency && it->second.version == row.version);
  }
}

// The same with rows so wide that few fit device memory, and change places with those that do not.
DeviceTableOptions ModelOptionsWithHotRows() {
  DeviceTableOptions options = ModelOptions();
  options.slots.push_back({"wide", 4000, SlotSpec::Init::kConstant, 0.0});
  options.max_hbm = int64_t{4} << 20;
  options.move_hot_rows = 20;
  return options;
}

void MixedOperationsAgreeWithAMap(const DeviceTableOptions& options, uint64_t key_space, int rounds,
                                  uint64_t seed) {
  Random random(seed);
  const auto table = Make(options);
  Model model;
  for (int round = 0; round < rounds; ++round) {
    const size_t n = random.Next(4) == 0 ? random.Next(4) : random.Next(1500);
    Array<int64_t> keys(n);
    Array<float> rows(n * kDim);
    for (size_t i = 0; i < n; ++i) {
      // Some keys over and over, the extreme ones among them.
      const uint64_t kind = random.Next(8);
      keys[i] = kind == 0
                    ? kExtremes[random.Next(5)]
                    : static_cast<int64_t>(random.Next(kind < 4 ? key_space / 16 + 1 : key_space)) * 0x10001;
      std::fill_n(&rows[i * kDim], kDim, static_cast<float>(random.Next(64)));
    }
    Array<float> out(n * kDim, -1.0f);
    Array<Flag> flags(n + 1);
    const Stamp stamp{static_cast<uint32_t>(random.Next(3)), static_cast<uint32_t>(round)};
    const auto touch = [&](ModelRow* row) {
      row->frequency += stamp.frequency;
      row->version = stamp.version;
    };
    switch (random.Next(13)) {
      case 0: {  // lookup
        const Array<float> defaults = {10, 10, 10, 20, 20, 20};
        const Missing missing = static_cast<Missing>(random.Next(3));
        table->Gather(Batch(keys), out.data(), missing, defaults.data(), 2, Bools(&flags), nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          const auto it = model.find(keys[i]);
          CHECK(flags[i].is_set == (it != model.end()));
          const float absent = missing == Missing::kZeros     ? 0.0f
                               : missing == Missing::kInitial ? kInitial
                                                              : (i % 2 == 0 ? 10.0f : 20.0f);
          for (size_t j = 0; j < kDim; ++j) {
            CHECK(out[i * kDim + j] == (it == model.end() ? absent : it->second.value));
          }
        }
        break;
      }
      case 1:
      case 2: {
        table->GatherOrInsert(Batch(keys), out.data(), stamp, Bools(&flags), nullptr);
        Finish();
        std::set<int64_t> fresh;
        for (size_t i = 0; i < n; ++i) {
          if (model.emplace(keys[i], ModelRow{}).second) fresh.insert(keys[i]);
          if (fresh.count(keys[i]) != 0) touch(&model[keys[i]]);
          CHECK(flags[i].is_set == (fresh.count(keys[i]) != 0));
          for (size_t j = 0; j < kDim; ++j) CHECK(out[i * kDim + j] == model[keys[i]].value);
        }
        break;
      }
      case 3:
      case 4: {
        table->Upsert(Batch(keys), rows.data(), stamp, nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          const float value = rows[i * kDim];
          // A row comes to be with its key's first value, which the slot copies.
          ModelRow& row = model.emplace(keys[i], ModelRow{value, value, 0, 0}).first->second;
          row.value = value;
          touch(&row);
        }
        break;
      }
      case 5: {
        const bool from_zeros = random.Next(2) == 0;
        table->Accumulate(Batch(keys), rows.data(), from_zeros, stamp, nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          const float first = from_zeros ? 0.0f : kInitial;
          ModelRow& row = model.emplace(keys[i], ModelRow{first, first, 0, 0}).first->second;
          row.value += rows[i * kDim];
          touch(&row);
        }
        break;
      }
      case 6: {
        Array<uint64_t> removed(1, UINT64_MAX);
        table->Remove(Batch(keys), removed.data(), nullptr);
        Finish();
        const size_t before = model.size();
        for (const int64_t key : keys) model.erase(key);
        CHECK(removed[0] == before - model.size());
        break;
      }
      case 7: {
        table->Contains(Batch(keys), Bools(&flags), nullptr);
        Finish();
        Array<uint32_t> freqs(n);
        Array<uint32_t> versions(n);
        table->GatherStamps(Batch(keys), freqs.data(), versions.data(), nullptr);
        Finish();
        Array<void*> pointers(n);
        table->Pointers(Batch(keys), pointers.data(), nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          const auto it = model.find(keys[i]);
          const bool is_there = it != model.end();
          CHECK(flags[i].is_set == is_there);
          CHECK(freqs[i] == (is_there ? it->second.frequency : 0));
          CHECK(versions[i] == (is_there ? it->second.version : 0));
          CHECK((pointers[i] != nullptr) == is_there);
          if (!is_there) continue;
          float row[kDim];
          Read(&row, pointers[i]);
          CHECK(row[kDim - 1] == it->second.value);
        }
        break;
      }
      case 8: {
        Array<float> copies(n * kDim);
        Array<float> constants(n * 2);
        table->GatherColumns(Batch(keys),
                             {{1, copies.data(), kDim}, {2, constants.data(), 2}, {0, out.data(), kDim}},
                             Bools(&flags), nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          const auto it = model.find(keys[i]);
          CHECK(flags[i].is_set == (it != model.end()));
          const ModelRow row = it == model.end() ? ModelRow{} : it->second;
          CHECK(copies[i * kDim] == row.copy && copies[i * kDim + kDim - 1] == row.copy);
          CHECK(constants[2 * i] == 7.0f && constants[2 * i + 1] == 7.0f);
          CHECK(out[i * kDim] == row.value);
        }
        break;
      }
      case 9: {
        Array<uint32_t> freqs(n);
        Array<uint32_t> versions(n);
        for (size_t i = 0; i < n; ++i) {
          freqs[i] = static_cast<uint32_t>(random.Next(9));
          versions[i] = static_cast<uint32_t>(random.Next(9));
        }
        table->Import(Batch(keys), {{1, rows.data(), kDim}}, freqs.data(), versions.data(), nullptr, nullptr);
        Finish();
        for (size_t i = 0; i < n; ++i) {
          ModelRow& row = model[keys[i]];
          row.copy = rows[i * kDim];
          row.frequency = freqs[i];
          row.version = versions[i];
        }
        break;
      }
      case 10: {
        const uint32_t bound = static_cast<uint32_t>(random.Next(4));
        const bool by_version = random.Next(4) == 0;
        Array<uint64_t> removed(1, UINT64_MAX);
        table->RemoveIf(
            {by_version ? RowPredicate::Test::kVersionAtLeast : RowPredicate::Test::kFrequencyBelow,
             by_version ? static_cast<uint32_t>(round) - bound : bound},
            removed.data(), nullptr);
        Finish();
        const size_t before = model.size();
        for (auto it = model.begin(); it != model.end();) {
          const bool goes = by_version ? it->second.version >= static_cast<uint32_t>(round) - bound
                                       : it->second.frequency < bound;
          it = goes ? model.erase(it) : std::next(it);
        }
        CHECK(removed[0] == before - model.size());
        break;
      }
      case 11: {
        const size_t rows = model.size() - std::min(model.size(), random.Next(model.size() / 4 + 2));
        const ShrinkOrder order = static_cast<ShrinkOrder>(random.Next(2));
        table->Shrink(static_cast<int64_t>(rows), order, nullptr);
        Finish();
        // The same by sorting.
        std::vector<std::pair<std::pair<uint32_t, uint32_t>, uint64_t>> all;
        for (const auto& [key, row] : model) {
          std::pair<uint32_t, uint32_t> stamps(row.version, row.frequency);
          if (order == ShrinkOrder::kLeastFrequent) std::swap(stamps.first, stamps.second);
          all.emplace_back(stamps, static_cast<uint64_t>(key));
        }
        std::sort(all.begin(), all.end());
        for (size_t i = 0; i + rows < all.size(); ++i) model.erase(static_cast<int64_t>(all[i].second));
        break;
      }
      default:
        if (random.Next(8) == 0) {
          table->Clear(nullptr);
          Finish();
          model.clear();
        } else {
          Array<void*> pointers(n);
          table->PointersOrInsert(Batch(keys), pointers.data(), {0, 0}, Bools(&flags), nullptr);
          Finish();
          for (size_t i = 0; i < n; ++i) {
            model.emplace(keys[i], ModelRow{});
            float first;
            Read(&first, pointers[i]);
            CHECK(first == model[keys[i]].value);
          }
        }
        break;
    }
    if (random.Next(8) == 0) table->MoveHotRows(static_cast<int64_t>(random.Next(100)), nullptr);
    if (round % 16 == 0) Agree(table.get(), model, &random);
  }
  Agree(table.get(), model, &random);
}

// ---- Single behaviours

void ThreadsThatInsertEqualKeysAgree() {
  DeviceTableOptions options;
  options.dim = 1;
  const auto table = Make(options);
  for (int round = 0; round < 40; ++round) {
    // Few keys, each hundreds of times, all at once, and none of them there before.
    Array<int64_t> keys(6000);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = round * 1000 + static_cast<int64_t>(Mix64(i) % 16);
    }
    const Array<float> ones(keys.size(), 1.0f);
    table->Accumulate(Batch(keys), ones.data(), true, {1, 0}, nullptr);
    Finish();
    CHECK(table->Size() == (round + 1) * 16);
    std::map<int64_t, float> counts;
    for (const int64_t key : keys) counts[key] += 1.0f;
    Array<float> out(keys.size());
    Array<uint32_t> freqs(keys.size());
    table->Gather(Batch(keys), out.data(), Missing::kZeros, nullptr, 0, nullptr, nullptr);
    table->GatherStamps(Batch(keys), freqs.data(), nullptr, nullptr);
    Finish();
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK(out[i] == counts[keys[i]]);
      CHECK(static_cast<float>(freqs[i]) == counts[keys[i]]);
    }
  }
}

void GrowthMovesNoRowAndLosesNoKey() {
  DeviceTableOptions options;
  options.dim = 8;
  options.max_hbm = int64_t{3} << 20;  // beyond, rows are in host memory
  options.move_hot_rows = 0;
  const auto table = Make(options);
  const Array<int64_t> first_key = {42};
  Array<void*> before(1);
  Array<void*> after(1);
  table->PointersOrInsert({first_key.data(), 1, true}, before.data(), {}, nullptr, nullptr);
  Finish();
  constexpr int64_t kRows = 150000;
  Array<int64_t> keys(10000);
  Array<float> rows(keys.size() * 8);
  for (int64_t begin = 0; begin < kRows; begin += 10000) {
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = (begin + static_cast<int64_t>(i)) << 32;
      std::fill_n(&rows[8 * i], 8, static_cast<float>(begin + static_cast<int64_t>(i)));
    }
    table->Upsert({keys.data(), 10000, true}, rows.data(), {}, nullptr);
    Finish();
  }
  table->Pointers({first_key.data(), 1, true}, after.data(), nullptr);
  Finish();
  CHECK(before == after);
  CHECK(table->Size() == kRows + 1);
  Array<float> out(rows.size());
  Array<Flag> found(keys.size());
  for (int64_t begin = 0; begin < kRows; begin += 10000) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = (begin + static_cast<int64_t>(i)) << 32;
    table->Gather(Batch(keys), out.data(), Missing::kZeros, nullptr, 0, Bools(&found), nullptr);
    Finish();
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK(found[i].is_set && out[8 * i] == static_cast<float>(begin + static_cast<int64_t>(i)));
      CHECK(out[8 * i + 7] == out[8 * i]);
    }
  }
  const DeviceMemoryUse use = table->Memory();
  CHECK(use.host_bytes > 0);
  CHECK(use.rows == kRows + 1 && use.row_bytes == use.rows * 32);
  // No more than 30 bytes beside a row, whatever the growth left behind.
  CHECK(static_cast<double>(use.index_bytes + use.column_bytes) / static_cast<double>(use.rows) < 32.0);
}

void RowsOfRemovedKeysAreUsedAgain() {
  DeviceTableOptions options;
  options.dim = 4;
  const auto table = Make(options);
  table->Reserve(5000, 5000, nullptr);
  const int64_t room = table->Memory().slack_bytes;
  Array<int64_t> keys(5000);
  const Array<float> rows(keys.size() * 4, 1.0f);
  for (int64_t round = 0; round < 50; ++round) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = round * 7919 + static_cast<int64_t>(i);
    table->Upsert(Batch(keys), rows.data(), {}, nullptr);
    Finish();
    CHECK(table->Size() == 5000);
    table->Remove(Batch(keys), nullptr);
    Finish();
    CHECK(table->Size() == 0);
  }
  CHECK(table->Memory().slack_bytes == room);
}

void InitialValuesAreThoseOfTheCpu(ValueType type, int64_t dim, Initializer::Kind kind) {
  DeviceTableOptions options;
  options.dim = dim;
  options.value_type = type;
  options.initializer.kind = kind;
  options.initializer.a = kind == Initializer::Kind::kUniform ? -0.5 : 0.1;
  options.initializer.b = 0.75;
  options.initializer.seed = 99;
  const size_t bytes = static_cast<size_t>(dim * SizeOf(type));
  if (kind == Initializer::Kind::kRows) {
    std::vector<char> rows(7 * bytes);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<char>(i);
    options.initializer.rows = std::make_shared<const std::vector<char>>(rows);
    options.initializer.num_rows = 7;
  }
  const auto table = Make(options);
  const InitialValue cpu(options.initializer, type, dim);
  Array<int64_t> keys(std::begin(kExtremes), std::end(kExtremes));
  for (int64_t i = 0; i < 300; ++i) keys.push_back(i * 12345677);
  Array<char> read(keys.size() * bytes);
  Array<char> made(keys.size() * bytes);
  Array<char> expected(bytes);
  table->Gather(Batch(keys), read.data(), Missing::kInitial, nullptr, 0, nullptr, nullptr);
  Finish();
  CHECK(table->Size() == 0);
  table->GatherOrInsert(Batch(keys), made.data(), {}, nullptr, nullptr);
  Finish();
  for (size_t i = 0; i < keys.size(); ++i) {
    cpu.Fill(static_cast<uint64_t>(keys[i]), expected.data());
    CHECK(std::memcmp(&read[i * bytes], expected.data(), bytes) == 0);
    CHECK(std::memcmp(&made[i * bytes], expected.data(), bytes) == 0);
  }
}

template <class T>
void AccumulateAddsEveryType(ValueType type, T one, T three) {
  DeviceTableOptions options;
  options.dim = 5;  // odd, so that narrow elements share words with other rows'
  options.value_type = type;
  const auto table = Make(options);
  Array<int64_t> keys;
  for (int64_t i = 0; i < 3000; ++i) keys.push_back(i % 1000);
  const Array<T> ones(keys.size() * 5, one);
  Array<T> out(keys.size() * 5);
  table->Accumulate(Batch(keys), ones.data(), true, {}, nullptr);
  table->Gather(Batch(keys), out.data(), Missing::kZeros, nullptr, 0, nullptr, nullptr);
  Finish();
  for (const T& x : out) CHECK(std::memcmp(&x, &three, sizeof(T)) == 0);
}

void NarrowKeysAreSignExtended() {
  DeviceTableOptions options;
  options.key_type = KeyType::kInt32;
  options.dim = 1;
  options.initializer = {Initializer::Kind::kUniform, 0.0, 1.0, 5, nullptr, 0};
  const auto table = Make(options);
  const Array<int32_t> keys = {std::numeric_limits<int32_t>::min(), -1, 0, 1,
                               std::numeric_limits<int32_t>::max()};
  Array<float> out(keys.size());
  table->GatherOrInsert({keys.data(), 5, false}, out.data(), {}, nullptr, nullptr);
  Finish();
  const InitialValue cpu(options.initializer, ValueType::kFloat32, 1);
  for (size_t i = 0; i < keys.size(); ++i) {
    float expected;
    cpu.Fill(static_cast<uint64_t>(static_cast<int64_t>(keys[i])), &expected);
    CHECK(out[i] == expected);
  }
  Array<int32_t> exported(1000);
  DeviceExporter::Buffers buffers;
  buffers.keys = exported.data();
  std::multiset<int32_t> all;
  const auto exporter = table->Export({});
  for (int64_t n; (n = exporter->Next(1000, buffers, nullptr)) > 0;)
    all.insert(exported.data(), exported.data() + n);
  CHECK(all == std::multiset<int32_t>(keys.begin(), keys.end()));
}

void FrequencySaturates() {
  DeviceTableOptions options;
  options.dim = 1;
  const auto table = Make(options);
  const Array<int64_t> keys(1000, 3);
  const Array<float> rows(keys.size());
  table->Upsert(Batch(keys), rows.data(), {uint32_t{1} << 30, 1}, nullptr);
  Finish();
  Array<uint32_t> frequency(1);
  table->GatherStamps({keys.data(), 1, true}, frequency.data(), nullptr, nullptr);
  Finish();
  CHECK(frequency[0] == UINT32_MAX);
  // Few that carry it past the end, and as many that do not.
  for (const uint32_t room : {5u, 63u, 64u, 999u, 1000u, 70000u}) {
    for (const int64_t n : {64, 1000}) {
      const Array<uint32_t> before(1, UINT32_MAX - room);
      table->Import({keys.data(), 1, true}, {{0, rows.data(), 1}}, before.data(), nullptr, {}, nullptr);
      table->Upsert({keys.data(), n, false}, rows.data(), {1, 1}, nullptr);
      table->GatherStamps({keys.data(), 1, true}, frequency.data(), nullptr, nullptr);
      Finish();
      CHECK(frequency[0] == UINT32_MAX - (room > n ? room - static_cast<uint32_t>(n) : 0));
    }
  }
}

#if !defined(KVTABLE_TEST_CUDA)  // a device cannot be made small
void OutOfMemoryLeavesTheTableAsItWas() {
  DeviceTableOptions options;
  options.name = "small";
  options.dim = 64;
  const auto table = Make(options, size_t{8} << 20);
  Array<int64_t> keys(2000);
  Array<float> rows(keys.size() * 64);
  int64_t rows_in = 0;
  bool full = false;
  for (int64_t batch = 0; batch < 100 && !full; ++batch) {
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = batch * 2000 + static_cast<int64_t>(i);
      std::fill_n(&rows[i * 64], 64, static_cast<float>(keys[i]));
    }
    try {
      table->Upsert(Batch(keys), rows.data(), {}, nullptr);
      Finish();
      rows_in += 2000;
    } catch (const Error& error) {
      full = true;
      CHECK(error.code() == ErrorCode::kResourceExhausted);
      CHECK(std::strstr(error.what(), "'small'") != nullptr && std::strstr(error.what(), "bytes") != nullptr);
    }
  }
  CHECK(full && rows_in >= 16000 && table->Size() == rows_in);
  Array<float> out(rows.size());
  Array<Flag> found(keys.size());
  table->Gather(Batch(keys), out.data(), Missing::kZeros, nullptr, 0, Bools(&found), nullptr);
  Finish();
  CHECK(std::none_of(found.begin(), found.end(), [](Flag x) { return x.is_set; }));
  // Keys that are there need no room, so the full table goes on training.
  for (int64_t batch = 0; batch < rows_in / 2000; ++batch) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = batch * 2000 + static_cast<int64_t>(i);
    table->GatherOrInsert(Batch(keys), out.data(), {}, nullptr, nullptr);
    Finish();
    for (size_t i = 0; i < keys.size(); ++i) CHECK(out[i * 64 + 63] == static_cast<float>(keys[i]));
  }
}

#endif

void MistakesAreErrors() {
  DeviceTableOptions options;
  options.dim = 0;
  CHECK(Throws(ErrorCode::kInvalidArgument, [&] { Make(options); }));
  options.dim = 2;
  options.initializer = {Initializer::Kind::kUniform, 1.0, 0.0, 0, nullptr, 0};
  CHECK(Throws(ErrorCode::kInvalidArgument, [&] { Make(options); }));
  options.initializer = {};
  const auto table = Make(options);
  const int64_t key = 1;
  float row[2] = {};
  CHECK(Throws(ErrorCode::kInvalidArgument, [&] {
    table->Gather({&key, 1, true}, row, Missing::kDefault, nullptr, 0, nullptr, nullptr);
  }));
  CHECK(Throws(ErrorCode::kFailedPrecondition,
               [&] { table->UpsertColumns({&key, 1, true}, {{1, row, 2}}, {}, nullptr); }));
  CHECK(Throws(ErrorCode::kInvalidArgument, [&] { table->Export({})->Next(0, {}, nullptr); }));
  CHECK(table->Size() == 0);
}

#if defined(KVTABLE_TEST_CUDA)
void WithoutADeviceTheErrorSaysSo() {
  DeviceTableOptions options;
  options.name = "mine";
  options.dim = 1;
  CHECK(Throws(ErrorCode::kFailedPrecondition, [&] { Make(options); }));
}
#endif

}  // namespace
}  // namespace kvtable

int main(int argc, char** /*argv*/) {
#if defined(KVTABLE_TEST_CUDA)
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    kvtable::WithoutADeviceTheErrorSaysSo();
    std::puts("There is no CUDA device: nothing ran but the error that says so.");
    return 0;
  }
#endif
  using kvtable::Initializer;
  using kvtable::ValueType;
  if (argc > 1) {  // any argument: the least that touches everything, for tools that are slow
    kvtable::MixedOperationsAgreeWithAMap(kvtable::ModelOptions(), 300, 30, 5);
    kvtable::MixedOperationsAgreeWithAMap(kvtable::ModelOptionsWithHotRows(), 800, 30, 6);
    return 0;
  }
  for (uint64_t seed = 0; seed < 3; ++seed) {
    kvtable::MixedOperationsAgreeWithAMap(kvtable::ModelOptions(), 3000, 120, seed << 32);
    kvtable::MixedOperationsAgreeWithAMap(kvtable::ModelOptionsWithHotRows(), 1000, 120, seed << 33);
  }
  kvtable::MixedOperationsAgreeWithAMap(kvtable::ModelOptions(), 30, 120, 77);
  kvtable::ThreadsThatInsertEqualKeysAgree();
  kvtable::GrowthMovesNoRowAndLosesNoKey();
  kvtable::RowsOfRemovedKeysAreUsedAgain();
  for (const auto type :
       {ValueType::kFloat32, ValueType::kFloat64, ValueType::kFloat16, ValueType::kBFloat16}) {
    for (const auto kind :
         {Initializer::Kind::kConstant, Initializer::Kind::kUniform, Initializer::Kind::kNormal,
          Initializer::Kind::kTruncatedNormal, Initializer::Kind::kRows}) {
      for (const int64_t dim : {1, 8, 33}) kvtable::InitialValuesAreThoseOfTheCpu(type, dim, kind);
    }
  }
  kvtable::AccumulateAddsEveryType<float>(ValueType::kFloat32, 1.0f, 3.0f);
  kvtable::AccumulateAddsEveryType<double>(ValueType::kFloat64, 1.0, 3.0);
  kvtable::AccumulateAddsEveryType<uint16_t>(ValueType::kFloat16, 0x3c00, 0x4200);
  kvtable::AccumulateAddsEveryType<uint16_t>(ValueType::kBFloat16, 0x3f80, 0x4040);
  kvtable::AccumulateAddsEveryType<int8_t>(ValueType::kInt8, 50, -106);
  kvtable::AccumulateAddsEveryType<int32_t>(ValueType::kInt32, 1, 3);
  kvtable::AccumulateAddsEveryType<int64_t>(ValueType::kInt64, -1, -3);
  kvtable::AccumulateAddsEveryType<uint8_t>(ValueType::kBool, 1, 1);
  kvtable::NarrowKeysAreSignExtended();
  kvtable::FrequencySaturates();
#if !defined(KVTABLE_TEST_CUDA)
  kvtable::OutOfMemoryLeavesTheTableAsItWas();
#endif
  kvtable::MistakesAreErrors();
  return 0;
}
