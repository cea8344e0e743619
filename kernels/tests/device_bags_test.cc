// Bags of pooled lookups on device memory, run on threads: splits that are made of sparse indices, and splits
// that are wrong.
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/threads_table.h"
#include "check.h"
#include "base/hash.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "pool.h"

namespace kvtable {
namespace {

std::unique_ptr<DeviceTable> Make() {
  DeviceTableOptions options;
  options.name = "clicks";
  options.dim = 3;
  options.initializer.a = 1.0;
  return MakeThreadsTable(options, &Pool());
}

// What CheckBags says; nothing where all is well.
std::string Mistake(DeviceTable* table) {
  try {
    table->CheckBags(nullptr);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

bool Says(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }

void SplitsAreThoseOfTheRowIds() {
  const auto table = Make();
  uint64_t state = 3;
  const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
  for (int round = 0; round < 60; ++round) {
    const size_t stride = 1 + next(3);
    const size_t bags = next(5) == 0 ? 1 : 1 + next(400);
    std::vector<int64_t> row_ids;
    std::vector<int64_t> expected = {0};
    for (size_t bag = 0; bag < bags; ++bag) {
      for (uint64_t i = next(3) == 0 ? next(9) : 0; i > 0; --i) {
        row_ids.push_back(static_cast<int64_t>(bag));
        row_ids.resize(row_ids.size() + stride - 1, -7);  // other columns
      }
      expected.push_back(static_cast<int64_t>(row_ids.size() / stride));
    }
    std::vector<int64_t> splits(bags + 1, -1);
    table->MakeSplits(row_ids.data(), static_cast<int64_t>(stride), expected.back(),
                      static_cast<int64_t>(bags), splits.data(), nullptr);
    CHECK(splits == expected);
  }
  int64_t none = -1;
  table->MakeSplits(nullptr, 2, 0, 0, &none, nullptr);
  CHECK(none == 0);
  CHECK(Mistake(table.get()).empty());
}

void RowIdsOutOfOrderAreAnError() {
  const auto table = Make();
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t least = std::numeric_limits<int64_t>::min();
  for (const auto& [row_ids, wrong] :
       std::vector<std::pair<std::vector<int64_t>, std::string>>{{{0, 1, 0, 2}, "number 2"},
                                                                 {{0, 1, 4, 4}, "number 2"},
                                                                 {{-1, 0, 1, 2}, "number 0"},
                                                                 {{0, 0, 0, most}, "number 3"},
                                                                 {{least, most, least, most}, "number 0"}}) {
    std::vector<int64_t> splits(5, -1);
    table->MakeSplits(row_ids.data(), 1, 4, 4, splits.data(), nullptr);
    CHECK(splits[0] == 0 && splits[4] == 4);
    for (const int64_t split : splits) CHECK(split >= 0 && split <= 4);
    const std::string text = Mistake(table.get());
    CHECK(Says(text, "'clicks'") && Says(text, wrong));
    CHECK(Mistake(table.get()).empty());  // told once
  }
  bool threw = false;
  try {
    table->MakeSplits(nullptr, 0, 0, 0, nullptr, nullptr);
  } catch (const Error& error) {
    threw = error.code() == ErrorCode::kInvalidArgument;
  }
  CHECK(threw);
}

// Whatever the splits hold, nothing is read or written beyond the arrays, and it is told.
void SplitsThatAreWrongDoNoHarmAndAreTold() {
  const auto table = Make();
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t least = std::numeric_limits<int64_t>::min();
  for (const auto& [splits, wrong] :
       std::vector<std::pair<std::vector<int64_t>, std::string>>{{{0, 2, 4, 4}, ""},
                                                                 {{0, 0, 0, 4}, ""},
                                                                 {{1, 2, 3, 4}, "bag 0"},
                                                                 {{0, 2, 3, 3}, "bag 2"},
                                                                 {{0, 3, 2, 4}, "bag 1"},
                                                                 {{0, 2, 4, 5}, "bag 2"},
                                                                 {{0, 2, most, 4}, "bag 1"},
                                                                 {{least, least, most, most}, "bag 0"},
                                                                 {{-1, 2, 3, 4}, "bag 0"}}) {
    for (const Combiner combiner : {Combiner::kSum, Combiner::kMean, Combiner::kSqrtN}) {
      for (const bool weighted : {false, true}) {
        const auto keys = std::make_unique<int64_t[]>(4);
        for (int64_t i = 0; i < 4; ++i) keys[i] = i * 11;
        const std::vector<float> weights(4, 0.5f);
        const DeviceBags bags{splits.data(), 3, weighted ? weights.data() : nullptr, combiner, 4};
        std::vector<float> pooled(9);
        std::vector<float> gradient(9, 1.0f);
        std::vector<float> of_weights(4);
        table->GatherPooledOrInsert({keys.get(), 4, true}, bags, {}, pooled.data(), nullptr);
        CHECK(Says(Mistake(table.get()), wrong) && table->Size() == 4);
        table->GatherPooled({keys.get(), 4, true}, bags, Missing::kInitial, pooled.data(), nullptr);
        if (weighted) {
          table->WeightsGradient({keys.get(), 4, true}, bags, Missing::kZeros, pooled.data(), gradient.data(),
                                 of_weights.data(), nullptr);
        }
        CHECK(Mistake(table.get()).empty() == wrong.empty());
        // Bags that overlap would write the same rows at the same time.
        if (splits[1] > splits[2] || splits[2] > splits[3]) continue;
        std::vector<float> spread(12);
        table->SpreadGradient(bags, gradient.data(), spread.data(), nullptr);
        const std::string text = Mistake(table.get());
        CHECK(text.empty() == wrong.empty() && Says(text, wrong));
      }
    }
  }
}

void KeysWithoutABagAreAnError() {
  const auto table = Make();
  const int64_t key = 1;
  const int64_t split = 0;
  float row[3];
  bool threw = false;
  try {
    table->GatherPooled({&key, 1, true}, {&split, 0, nullptr, Combiner::kSum}, Missing::kZeros, row, nullptr);
  } catch (const Error& error) {
    threw = error.code() == ErrorCode::kInvalidArgument;
  }
  CHECK(threw);
  table->GatherPooled({&key, 0, true}, {&split, 0, nullptr, Combiner::kSum}, Missing::kZeros, row, nullptr);
  CHECK(Mistake(table.get()).empty());
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::SplitsAreThoseOfTheRowIds();
  kvtable::RowIdsOutOfOrderAreAnError();
  kvtable::SplitsThatAreWrongDoNoHarmAndAreTold();
  kvtable::KeysWithoutABagAreAnError();
  return 0;
}
