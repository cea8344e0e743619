// EnsureSlots and SetInitializer of the table in device memory, run on threads, against the CPU's table.
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/threads_table.h"
#include "base/hash.h"
#include "check.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "pool.h"
#include "throws.h"
#include "values/elements.h"

namespace kvtable {
namespace {

std::unique_ptr<DeviceTable> Make(const DeviceTableOptions& options, size_t memory = SIZE_MAX) {
  return MakeThreadsTable(options, &Pool(), memory);
}

template <class Key>
class Pair {
 public:
  Pair(KeyType key_type, ValueType value_type, int64_t dim, int64_t max_hbm, uint64_t seed)
      : value_type_(value_type), dim_(dim), state_(seed) {
    TableOptions cpu;
    cpu.key_type = key_type;
    cpu.value_type = value_type;
    cpu.dim = dim;
    cpu.shards = 2;
    cpu_ = Table::Create(cpu);
    DeviceTableOptions device;
    device.key_type = key_type;
    device.value_type = value_type;
    device.dim = dim;
    device.max_hbm = max_hbm;
    device_ = Make(device);
  }

  // Slots come, go, and change places and widths between writes.
  void Run(int rounds, size_t most_keys) {
    for (int round = 0; round < rounds; ++round) {
      std::vector<Key> keys(Next(8) == 0 ? 0 : 1 + Next(most_keys));
      for (Key& key : keys) {
        switch (Next(16)) {
          case 0:
            key = std::numeric_limits<Key>::min();
            break;
          case 1:
            key = std::numeric_limits<Key>::max();
            break;
          default:
            key = static_cast<Key>(Mix64(Next(2 * most_keys)));
        }
      }
      const int64_t n = static_cast<int64_t>(keys.size());
      const DeviceKeys batch{keys.data(), n, false};
      const Stamp stamp{static_cast<uint32_t>(Next(3)), static_cast<uint32_t>(round)};
      switch (Next(6)) {
        case 0: {
          const std::vector<char> rows = Rows(n, dim_);
          cpu_->Upsert(keys.data(), n, rows.data(), stamp, Pool());
          device_->Upsert(batch, rows.data(), stamp, nullptr);
          break;
        }
        case 1:
          cpu_->Remove(keys.data(), n / 3, Pool());
          device_->Remove({keys.data(), n / 3, false}, nullptr);
          break;
        case 2:
        case 3: {
          std::vector<std::vector<char>> data;
          std::vector<ColumnIn> in;
          for (size_t s = 0; s <= slots_.size(); ++s) {
            if (Next(2) != 0) continue;
            const int64_t width = s == 0 ? dim_ : slots_[s - 1].width;
            data.push_back(Rows(n, width));
            in.push_back({static_cast<int>(s), data.back().data(), width});
          }
          if (Next(2) == 0) {
            cpu_->UpsertColumns(keys.data(), n, in, stamp, Pool());
            device_->UpsertColumns(batch, in, stamp, nullptr);
          } else {
            cpu_->Import(keys.data(), n, in, nullptr, nullptr, nullptr, Pool());
            device_->Import(batch, in, nullptr, nullptr, nullptr, nullptr);
          }
          break;
        }
        case 4: {
          Initializer initializer;
          initializer.kind = IsFloating(value_type_) ? static_cast<Initializer::Kind>(Next(4))
                                                     : Initializer::Kind::kConstant;
          initializer.a = static_cast<double>(Next(2));
          initializer.b = 2.0;
          initializer.seed = Next(5);
          if (Next(4) == 0) {
            initializer.kind = Initializer::Kind::kRows;
            initializer.num_rows = 3;
            initializer.rows = std::make_shared<const std::vector<char>>(Rows(3, dim_));
          }
          cpu_->SetInitializer(initializer);
          device_->SetInitializer(initializer, nullptr);
          std::vector<char> a(static_cast<size_t>(n * dim_ * SizeOf(value_type_)));
          std::vector<char> b(a.size());
          cpu_->GatherOrInsert(keys.data(), n, a.data(), stamp, nullptr, Pool());
          device_->GatherOrInsert(batch, b.data(), stamp, nullptr, nullptr);
          CHECK(a == b);
          break;
        }
        default:
          ChangeSlots();
      }
      Compare(keys);
      if (round % 5 == 0) Compare(all_keys_);
      all_keys_.insert(all_keys_.end(), keys.begin(), keys.end());
    }
    Compare(all_keys_);
  }

 private:
  uint64_t Next(uint64_t below) { return Mix64(++state_) % below; }

  void ChangeSlots() {
    std::vector<SlotSpec> slots;
    const uint64_t constants = value_type_ == ValueType::kBool ? 2 : 4;
    for (const char* name : {"a", "b", "c", "d"}) {
      const SlotSpec::Init init = Next(3) == 0 ? SlotSpec::Init::kCopyValue : SlotSpec::Init::kConstant;
      const int64_t width =
          init == SlotSpec::Init::kCopyValue || Next(2) == 0 ? dim_ : static_cast<int64_t>(1 + Next(5));
      if (Next(2) == 0) slots.push_back({name, width, init, static_cast<double>(Next(constants))});
    }
    if (slots.size() > 1 && Next(2) == 0) std::swap(slots[0], slots[1]);
    if (Next(4) == 0) slots = slots_;
    const uint64_t before = device_->generation();
    const uint64_t of_cpu = cpu_->EnsureSlots(slots, Pool());
    CHECK(device_->EnsureSlots(slots, nullptr) == of_cpu);
    CHECK(device_->generation() == of_cpu && (of_cpu == before) == (slots == slots_));
    CHECK(device_->slots() == slots && device_->options().slots == slots);
    slots_ = slots;
  }

  void Compare(const std::vector<Key>& keys) {
    const int64_t n = static_cast<int64_t>(keys.size());
    CHECK(cpu_->Size() == device_->Size());
    std::vector<std::vector<char>> data[2];
    std::vector<uint32_t> stamps[4];
    for (auto& column : stamps) column.resize(keys.size());
    for (auto& side : data) {
      std::vector<ColumnOut> out;
      for (size_t s = 0; s <= slots_.size(); ++s) {
        const int64_t width = s == 0 ? dim_ : slots_[s - 1].width;
        side.emplace_back(static_cast<size_t>(n * width * SizeOf(value_type_)));
        out.push_back({static_cast<int>(s), side.back().data(), width});
      }
      if (&side == data) {
        cpu_->GatherColumns(keys.data(), n, out, nullptr, Pool());
      } else {
        device_->GatherColumns({keys.data(), n, false}, out, nullptr, nullptr);
      }
    }
    for (size_t c = 0; c < data[0].size(); ++c) CHECK(data[0][c] == data[1][c]);
    cpu_->GatherStamps(keys.data(), n, stamps[0].data(), stamps[1].data(), Pool());
    device_->GatherStamps({keys.data(), n, false}, stamps[2].data(), stamps[3].data(), nullptr);
    CHECK(stamps[0] == stamps[2] && stamps[1] == stamps[3]);
    const auto a = std::make_unique<bool[]>(keys.size());
    const auto b = std::make_unique<bool[]>(keys.size());
    cpu_->Zeroed(keys.data(), n, a.get(), Pool());
    device_->Zeroed({keys.data(), n, false}, b.get(), nullptr);
    CHECK(std::equal(a.get(), a.get() + n, b.get()));
  }

  // Zeros and ones, and rows of zeros among them.
  std::vector<char> Rows(int64_t n, int64_t width) {
    std::vector<char> rows(static_cast<size_t>(n * width * SizeOf(value_type_)));
    VisitAnyValueType(value_type_, [&](auto t) {
      using T = decltype(t);
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t numbers = Next(3) == 0 ? 1 : 2;
        for (int64_t j = 0; j < width; ++j) {
          const T x = Element<T>::FromDouble(static_cast<double>(Next(numbers)));
          std::memcpy(&rows[static_cast<size_t>(i * width + j) * sizeof(T)], &x, sizeof(T));
        }
      }
    });
    return rows;
  }

  const ValueType value_type_;
  const int64_t dim_;
  uint64_t state_;
  std::unique_ptr<Table> cpu_;
  std::unique_ptr<DeviceTable> device_;
  std::vector<SlotSpec> slots_;
  std::vector<Key> all_keys_;
};

// ---- Memory

constexpr int64_t kRows = 60000;
constexpr int64_t kWidth = 64;

SlotSpec Wide(const char* name, double constant) {
  return {name, kWidth, SlotSpec::Init::kConstant, constant};
}

void Holds(DeviceTable* table, int64_t keys, const std::vector<float>& slots) {
  std::vector<int64_t> some;
  for (int64_t key = 0; key < keys; key += 37) some.push_back(key);
  const int64_t n = static_cast<int64_t>(some.size());
  std::vector<std::vector<float>> data(1 + slots.size(), std::vector<float>(some.size() * kWidth));
  std::vector<ColumnOut> out;
  for (size_t c = 0; c < data.size(); ++c) out.push_back({static_cast<int>(c), data[c].data(), kWidth});
  table->GatherColumns({some.data(), n, true}, out, nullptr, nullptr);
  for (size_t i = 0; i < some.size(); ++i) {
    for (size_t c = 0; c < data.size(); ++c) {
      const float expected = c == 0 ? static_cast<float>(some[i]) : slots[c - 1];
      CHECK(data[c][i * kWidth] == expected && data[c][i * kWidth + kWidth - 1] == expected);
    }
  }
}

void ChangingSlotsTakesNoSecondTable(int64_t max_hbm) {
  DeviceTableOptions options;
  options.name = "wide";
  options.dim = kWidth;
  options.max_hbm = max_hbm;
  // A value and a slot, and an eighth of room, are 35 MB; the table before beside these would be 52.
  const auto table = Make(options, size_t{48} << 20);
  std::vector<int64_t> keys(5000);
  std::vector<float> rows(keys.size() * kWidth);
  for (int64_t begin = 0; begin < kRows; begin += 5000) {
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = begin + static_cast<int64_t>(i);
      std::fill_n(&rows[i * kWidth], kWidth, static_cast<float>(keys[i]));
    }
    table->Upsert({keys.data(), 5000, true}, rows.data(), {}, nullptr);
  }
  const int64_t narrow = table->Memory().row_bytes + table->Memory().slack_bytes;
  const int64_t narrow_on_host = table->Memory().host_bytes;
  for (int round = 0; round < 2; ++round) {
    CHECK(table->EnsureSlots({Wide("m", 0.5)}, nullptr) == static_cast<uint64_t>(2 + 2 * round));
    Holds(table.get(), kRows, {0.5f});
    const DeviceMemoryUse wide = table->Memory();
    CHECK(wide.host_bytes >= narrow_on_host && (wide.host_bytes > 0) == (max_hbm < INT64_MAX));
    CHECK(wide.row_bytes + wide.slack_bytes - wide.host_bytes <= max_hbm);

    // The next one is too much, and changes nothing.
    std::string message;
    try {
      table->EnsureSlots({Wide("v", 1.0), Wide("m", 0.5), Wide("u", 2.0)}, nullptr);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kResourceExhausted);
      message = error.what();
    }
    CHECK(message.find("'wide'") != std::string::npos && message.find("bytes") != std::string::npos);
    CHECK(table->generation() == static_cast<uint64_t>(2 + 2 * round) && table->slots().size() == 1);
    CHECK(table->Memory().slack_bytes == wide.slack_bytes);
    Holds(table.get(), kRows, {0.5f});

    table->EnsureSlots({}, nullptr);
    Holds(table.get(), kRows, {});
    const DeviceMemoryUse use = table->Memory();
    CHECK(use.row_bytes + use.slack_bytes >= narrow);
    CHECK(use.row_bytes + use.slack_bytes <= wide.row_bytes + wide.slack_bytes);
    CHECK(use.host_bytes <= wide.host_bytes);
  }
}

// Beyond a block, and beyond what is staged at a time.
void RowsGrowAndShrinkInTheirBlocks() {
  DeviceTableOptions options;
  options.dim = kWidth;
  options.capacity_hint = kRows;
  const auto table = Make(options);
  std::vector<int64_t> keys(static_cast<size_t>(kRows));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  std::vector<float> rows(keys.size() * kWidth);
  for (size_t i = 0; i < keys.size(); ++i) std::fill_n(&rows[i * kWidth], kWidth, static_cast<float>(i));
  table->Upsert({keys.data(), kRows, true}, rows.data(), {}, nullptr);
  table->EnsureSlots({Wide("a", 1.0)}, nullptr);
  table->EnsureSlots({Wide("a", 9.0), Wide("b", 2.0), Wide("c", 3.0)}, nullptr);
  Holds(table.get(), kRows, {1.0f, 2.0f, 3.0f});
  table->EnsureSlots({Wide("c", 3.0), Wide("b", 2.0)}, nullptr);
  Holds(table.get(), kRows, {3.0f, 2.0f});
  // Of the memory that narrower rows leave, blocks of 64 MiB are freed, and the rest is for new rows.
  const auto bytes = [&] { return table->Memory().row_bytes + table->Memory().slack_bytes; };
  const int64_t before = bytes();
  table->EnsureSlots({}, nullptr);
  const int64_t after = bytes();
  CHECK(after <= before / 2);
  table->Reserve(after / (kWidth * 4) - 8192, 100, nullptr);
  CHECK(bytes() == after);
  Holds(table.get(), kRows, {});
}

// ---- Single behaviours

void WhatNoLongerFitsIsAnError() {
  DeviceTableOptions options;
  options.dim = 2;
  options.slots = {{"m", 2, SlotSpec::Init::kConstant, 0.0}};
  const auto table = Make(options);
  CHECK(table->generation() == 1 && table->slots() == options.slots);
  const int64_t key = 7;
  float data[4] = {1, 2, 3, 4};
  const DeviceKeys batch{&key, 1, true};
  table->Upsert(batch, data, {}, nullptr);
  const auto exporter = table->Export({});
  CHECK(table->EnsureSlots(options.slots, nullptr) == 1);
  CHECK(table->EnsureSlots({{"m", 3, SlotSpec::Init::kConstant, 5.0}}, nullptr) == 2);
  CHECK(Throws(ErrorCode::kFailedPrecondition,
               [&] { table->UpsertColumns(batch, {{1, data, 2}}, {}, nullptr); }));
  CHECK(Throws(ErrorCode::kFailedPrecondition,
               [&] { table->GatherColumns(batch, {{1, data, 2}}, nullptr, nullptr); }));
  DeviceExporter::Buffers out;
  out.columns = {{1, data, 2}};
  CHECK(Throws(ErrorCode::kFailedPrecondition, [&] { exporter->Next(100, out, nullptr); }));
  // Another width is another slot.
  table->GatherColumns(batch, {{1, data, 3}}, nullptr, nullptr);
  CHECK(data[0] == 5.0f && data[2] == 5.0f);
  // Slots that cannot be change nothing.
  CHECK(Throws(ErrorCode::kInvalidArgument,
               [&] { table->EnsureSlots({{"c", 3, SlotSpec::Init::kCopyValue, 0.0}}, nullptr); }));
  CHECK(table->generation() == 2 && table->slots().size() == 1);
}

void AnInitializerThatCannotBeChangesNothing() {
  DeviceTableOptions options;
  options.dim = 1;
  options.initializer.a = 3.0;
  const auto table = Make(options);
  CHECK(Throws(ErrorCode::kInvalidArgument, [&] {
    table->SetInitializer({Initializer::Kind::kUniform, 1.0, 0.0, 0, nullptr, 0}, nullptr);
  }));
  CHECK(table->initializer().a == 3.0 && table->options().initializer.a == 3.0);
  const int64_t keys[] = {1, 2};
  float out = 0;
  table->GatherOrInsert({&keys[0], 1, true}, &out, {}, nullptr, nullptr);
  CHECK(out == 3.0f);
  table->SetInitializer({Initializer::Kind::kConstant, 4.0, 0.0, 0, nullptr, 0}, nullptr);
  table->GatherOrInsert({&keys[0], 1, true}, &out, {}, nullptr, nullptr);
  CHECK(out == 3.0f && table->initializer().a == 4.0);
  table->GatherOrInsert({&keys[1], 1, true}, &out, {}, nullptr, nullptr);
  CHECK(out == 4.0f);
}

}  // namespace
}  // namespace kvtable

int main() {
#if defined(KVTABLE_TEST_FEW_ROUNDS)
  constexpr int kRounds = 2;
#else
  constexpr int kRounds = 20;
#endif
  using kvtable::KeyType;
  using kvtable::ValueType;
  uint64_t seed = 0;
  for (const auto type : {ValueType::kFloat32, ValueType::kFloat16, ValueType::kBFloat16, ValueType::kFloat64,
                          ValueType::kInt8, ValueType::kInt32, ValueType::kInt64, ValueType::kBool}) {
    for (const int64_t dim : {1, 7, 16}) {
      kvtable::Pair<int64_t>(KeyType::kInt64, type, dim, INT64_MAX, ++seed << 32).Run(3 * kRounds, 300);
      kvtable::Pair<int32_t>(KeyType::kInt32, type, dim, INT64_MAX, ++seed << 32).Run(kRounds, 300);
      kvtable::Pair<uint64_t>(KeyType::kUint64, type, dim, 0, ++seed << 32).Run(kRounds, 300);
    }
  }
  // Rows so wide that some thousand take many slabs, some of them in host memory.
  kvtable::Pair<int64_t>(KeyType::kInt64, ValueType::kFloat32, 1500, int64_t{9} << 20, 5).Run(25, 800);
  kvtable::ChangingSlotsTakesNoSecondTable(INT64_MAX);
  kvtable::ChangingSlotsTakesNoSecondTable(int64_t{20} << 20);
  kvtable::RowsGrowAndShrinkInTheirBlocks();
  kvtable::WhatNoLongerFitsIsAnError();
  kvtable::AnInitializerThatCannotBeChangesNothing();
  return 0;
}
