// Rows of 16 bits that are looked up as float32, and trained by gradients of float32, beside conversions of what the
// same lookup gives as it is.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../cuda/threads_table.h"
#include "check.h"
#include "kvtable/device_table_view.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/optimizer.h"
#include "kvtable/table.h"
#include "pool.h"
#include "throws.h"
#include "values/row_conversion.h"

namespace kvtable {
namespace {

constexpr int64_t kCount = 5000;

TableOptions Options(ValueType type, int64_t dim, int64_t max_capacity = 0) {
  TableOptions options;
  options.value_type = type;
  options.dim = dim;
  options.max_capacity = max_capacity;
  options.initializer.kind = Initializer::Kind::kUniform;
  options.initializer.a = -1.0;
  options.initializer.b = 1.0;
  options.initializer.seed = 7;
  return options;
}

// Many twice, one of each extreme.
std::vector<int64_t> Keys() {
  std::vector<int64_t> keys = {INT64_MIN, INT64_MAX, -1, 0};
  for (int64_t i = 4; i < kCount; ++i) keys.push_back(i * 7919 % 3000 - 1500);
  return keys;
}

// A lookup of `keys`: widened, and widened afterwards.
struct Both {
  Both(ValueType type, int64_t dim, size_t n)
      : elements(n * static_cast<size_t>(dim)),
        widened(elements, -9.f),
        narrow(elements),
        load(BestRowConversion(type).load) {
    for (auto& places : positions) places.assign(n, 1);
  }
  RowsOut Widened() { return {widened.data(), positions[0].data(), nullptr, true}; }
  RowsOut Narrow() { return {narrow.data(), positions[1].data()}; }
  void Check() const {
    std::vector<float> expected(elements);
    load(narrow.data(), static_cast<int64_t>(elements), expected.data());
    CHECK(elements == 0 || std::memcmp(expected.data(), widened.data(), elements * sizeof(float)) == 0);
    for (size_t i = 0; i < positions[0].size(); ++i) {  // which numbers rows have is the threads' affair
      CHECK((positions[0][i] == kNoPosition) == (positions[1][i] == kNoPosition));
    }
  }

  size_t elements;
  std::vector<float> widened;
  std::vector<uint16_t> narrow;
  std::vector<uint64_t> positions[2];
  decltype(RowConversion::load) load;
};

void LookupsGiveTheSameNumbers() {
  const std::vector<int64_t> keys = Keys();
  for (const ValueType type : {ValueType::kFloat16, ValueType::kBFloat16}) {
    for (const int64_t dim : {1, 3, 16, 64}) {
      for (const int64_t max_capacity : {int64_t{0}, int64_t{20000}}) {
        for (const size_t count : {size_t{1}, size_t{3}}) {
          std::vector<std::unique_ptr<Table>> owned[2];
          TableParts parts[2];
          for (size_t side = 0; side < 2; ++side) {
            for (size_t p = 0; p < count; ++p) {
              owned[side].push_back(Table::Create(Options(type, dim, max_capacity)));
              parts[side].push_back(owned[side].back().get());
            }
          }
          // Missing keys, new ones, and those that are there.
          for (const int64_t n : {int64_t{0}, int64_t{1}, kCount / 2, kCount}) {
            for (const bool insert : {false, true, false}) {
              for (const Missing missing : {Missing::kZeros, Missing::kInitial}) {
                Both both(type, dim, static_cast<size_t>(n));
                MissingKeys how;
                how.insert = insert;
                how.missing = missing;
                LookUpParts({{parts[0], keys.data(), n, both.Widened(), how}}, Pool());
                LookUpParts({{parts[1], keys.data(), n, both.Narrow(), how}}, Pool());
                both.Check();
              }
            }
          }
          for (size_t p = 0; p < count; ++p) CHECK(owned[0][p]->Size() == owned[1][p]->Size());
        }
      }
    }
  }
}

void KeysThatAreNotAdmittedAndDefaultsAreWidenedToo() {
  const int64_t dim = 5;
  const std::vector<int64_t> keys = Keys();
  const int64_t n = static_cast<int64_t>(keys.size());
  const auto table = Table::Create(Options(ValueType::kBFloat16, dim));
  for (const Missing below : {Missing::kZeros, Missing::kInitial}) {
    Both both(ValueType::kBFloat16, dim, keys.size());
    Insertion insertion;
    insertion.admission = 0.0;
    insertion.below = below;
    table->GatherOrInsert(keys.data(), n, both.Widened(), insertion, Pool());
    table->GatherOrInsert(keys.data(), n, both.Narrow(), insertion, Pool());
    both.Check();
    CHECK(table->Size() == 0);
  }
  const std::vector<uint16_t> defaults = {1, 2, 3, 4, 5, 16000, 16001, 16002, 16003, 16004};
  Both both(ValueType::kBFloat16, dim, keys.size());
  table->Gather(keys.data(), n, both.Widened(), Missing::kDefault, defaults.data(), 2, nullptr, Pool());
  table->Gather(keys.data(), n, both.Narrow(), Missing::kDefault, defaults.data(), 2, nullptr, Pool());
  both.Check();
}

void RowsFindTheirPlaces() {
  const std::vector<int64_t> keys = {8, 9, 8};
  const std::vector<uint32_t> where = {4, 0, 2};
  const auto table = Table::Create(Options(ValueType::kFloat16, 2));
  std::vector<float> there(6), placed(10, -9.f);
  table->GatherOrInsert(keys.data(), 3, {there.data(), nullptr, nullptr, true}, Insertion(), Pool());
  table->Gather(keys.data(), 3, {placed.data(), nullptr, where.data(), true}, Missing::kZeros, nullptr, 0,
                nullptr, Pool());
  for (size_t i = 0; i < 3; ++i) {
    CHECK(std::memcmp(&placed[2 * where[i]], &there[2 * i], 2 * sizeof(float)) == 0);
  }
  CHECK(placed[2] == -9.f && placed[3] == -9.f && placed[6] == -9.f && placed[7] == -9.f);
}

// w - 0.5 * (the sum of the gradients), rounded once.
void GradientsOfFloat32AreSummedAsTheyAre() {
  const std::vector<int64_t> keys = {1, 2, 1};
  const std::vector<float> gradients = {1e6f, 0.1f, -1e6f, 0.2f, 3e-9f, 0.4f};
  for (const ValueType type : {ValueType::kFloat16, ValueType::kBFloat16}) {
    for (const bool skip : {false, true}) {
      const auto table = Table::Create(Options(type, 2));
      std::vector<float> rows(4), moved(4);
      table->GatherOrInsert(keys.data(), 2, {rows.data(), nullptr, nullptr, true}, Insertion(), Pool());
      Update update = MakeUpdate("sgd", {{"learning_rate", 0.5}});
      update.float32_gradients = true;
      update.skip_nonfinite = skip;
      table->Apply(keys.data(), nullptr, 3, gradients.data(), update, {}, {}, Pool());
      table->Gather(keys.data(), 2, {moved.data(), nullptr, nullptr, true}, Missing::kZeros, nullptr, 0,
                    nullptr, Pool());
      rows[0] -= 0.5f * (1e6f + 3e-9f);
      rows[1] -= 0.5f * (0.1f + 0.4f);
      rows[2] -= 0.5f * -1e6f;
      rows[3] -= 0.5f * 0.2f;
      std::vector<uint16_t> rounded(4);
      BestRowConversion(type).store(rows.data(), 4, rounded.data());
      BestRowConversion(type).load(rounded.data(), 4, rows.data());
      CHECK(rows == moved);
    }
  }
}

void OtherTypesAreRefused() {
  const int64_t key = 1;
  std::vector<double> row(2);
  for (const ValueType type : {ValueType::kFloat32, ValueType::kFloat64}) {
    const auto table = Table::Create(Options(type, 2));
    const RowsOut out(row.data(), nullptr, nullptr, true);
    CHECK(Throws(ErrorCode::kInvalidArgument, "widened",
                 [&] { table->GatherOrInsert(&key, 1, out, Insertion(), Pool()); }));
    CHECK(Throws(ErrorCode::kInvalidArgument, "widened",
                 [&] { table->Gather(&key, 1, out, Missing::kZeros, nullptr, 0, nullptr, Pool()); }));
    Update update = MakeUpdate("sgd", {{"learning_rate", 0.5}});
    update.float32_gradients = true;
    CHECK(Throws(ErrorCode::kInvalidArgument, "16 bits",
                 [&] { table->Apply(&key, nullptr, 1, row.data(), update, {}, {}, Pool()); }));
    CHECK(table->Size() == 0);
  }
}

void TablesInDeviceMemoryRefuseFloat32() {
  DeviceTableOptions options;
  options.name = "far";
  options.value_type = ValueType::kFloat16;
  options.dim = 2;
  const auto table =
      ViewOf(MakeThreadsTable(options, &Pool()), MakeThreadsWork(nullptr, &Pool()), ArraysIn::kHost);
  const int64_t key = 1;
  std::vector<float> row(2, 3.0f);
  const RowsOut out(row.data(), nullptr, nullptr, true);
  CHECK(Throws(ErrorCode::kFailedPrecondition, "'far' is in device memory",
               [&] { table->GatherOrInsert(&key, 1, out, Insertion(), Pool()); }));
  CHECK(Throws(ErrorCode::kFailedPrecondition, "'far' is in device memory",
               [&] { table->Gather(&key, 1, out, Missing::kZeros, nullptr, 0, nullptr, Pool()); }));
  Update update = MakeUpdate("sgd", {{"learning_rate", 0.5}});
  update.float32_gradients = true;
  CHECK(Throws(ErrorCode::kFailedPrecondition, "'far' is in device memory",
               [&] { table->Apply(&key, nullptr, 1, row.data(), update, {}, {}, Pool()); }));
  CHECK(table->Size() == 0 && row == std::vector<float>(2, 3.0f));
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::LookupsGiveTheSameNumbers();
  kvtable::KeysThatAreNotAdmittedAndDefaultsAreWidenedToo();
  kvtable::RowsFindTheirPlaces();
  kvtable::GradientsOfFloat32AreSummedAsTheyAre();
  kvtable::OtherTypesAreRefused();
  kvtable::TablesInDeviceMemoryRefuseFloat32();
  return 0;
}
