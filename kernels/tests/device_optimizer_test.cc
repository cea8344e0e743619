// Training steps on the CPU's table and on the table in device memory: the same rows, slots, stamps and
// marks, bit for bit, for every optimizer and value type. On CPU threads, where a row has one lane; on emulated
// warps (KVTABLE_TEST_WARPS), where 16 lanes share it; and, compiled with KVTABLE_TEST_CUDA, on a GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "device_arrays.h"
#include "kvtable/device_table.h"
#include "kvtable/device_work.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "pool.h"
#include "values/elements.h"

#if !defined(KVTABLE_TEST_CUDA)
#include "../cuda/threads_table.h"
#endif

namespace kvtable {

namespace {

#if defined(KVTABLE_TEST_CUDA)
constexpr bool kPowersDiffer = true;  // pow of the device in the last bits from the host's
std::unique_ptr<DeviceTable> Make(const DeviceTableOptions& options) { return MakeCudaTable(options); }
std::unique_ptr<DeviceWork> MakeWork() { return MakeCudaWork(nullptr); }
#else
constexpr bool kPowersDiffer = false;
std::unique_ptr<DeviceTable> Make(const DeviceTableOptions& options, size_t memory = SIZE_MAX) {
  return MakeThreadsTable(options, &Pool(), memory);
}
std::unique_ptr<DeviceWork> MakeWork() { return MakeThreadsWork(nullptr, &Pool()); }
#endif

// A value in its range for each hyperparameter that has no default, and another than the default for some.
Update UpdateFor(const OptimizerSpec& spec, int round) {
  std::vector<std::pair<std::string, double>> values;
  for (const Hyperparameter& h : spec.hyperparameters) {
    const std::string name = h.name;
    const bool penalizes = name == "l1" || name == "l2" || name == "l21";
    if (name == "learning_rate") {
      values.emplace_back(name, 0.0625 + 0.01 * round);
    } else if (name == "beta_1_power") {
      values.emplace_back(name, std::pow(0.9, round + 1));
    } else if (name == "beta_2_power") {
      values.emplace_back(name, std::pow(0.999, round + 1));
    } else if (name == "step") {
      values.emplace_back(name, round == 0 ? 1 : 20 + round);  // radam takes both of its ways
    } else if (std::isnan(h.fallback)) {
      values.emplace_back(name, 0.75);
    } else if (round % 2 == 1 && (penalizes || name == "weight_decay" || name == "lamb_weight_decay")) {
      values.emplace_back(name, name == "l21" ? 0.4 : 0.03);
    } else if (round % 2 == 1 && name == "learning_rate_power" && !kPowersDiffer) {
      values.emplace_back(name, -0.375);
    } else if (round % 2 == 1 && h.range == Hyperparameter::Range::kFlag) {
      values.emplace_back(name, 1.0);
    }
  }
  return MakeUpdate(spec.name, values);
}

// Bit for bit; but all NaNs are equal.
bool SameElements(ValueType value_type, const Array<char>& a, const Array<char>& b) {
  if (a == b) return true;
  return VisitValueType(value_type, [&](auto t) {
    using T = decltype(t);
    for (size_t at = 0; at < a.size(); at += sizeof(T)) {
      T x;
      T y;
      std::memcpy(&x, &a[at], sizeof(T));
      std::memcpy(&y, &b[at], sizeof(T));
      const bool nan =
          Element<T>::Load(x) != Element<T>::Load(x) && Element<T>::Load(y) != Element<T>::Load(y);
      if (!nan && std::memcmp(&x, &y, sizeof(T)) != 0) return false;
    }
    return true;
  });
}

class Pair {
 public:
  Pair(const OptimizerSpec& spec, ValueType value_type, int64_t dim)
      : spec_(spec), value_type_(value_type), dim_(dim), seed_(Mix64(static_cast<uint64_t>(dim))) {
    // The rule's slots in another order than the rule's, and others between.
    slots_ = {{"narrow", 3, SlotSpec::Init::kConstant, 1.0}, {"copy", dim, SlotSpec::Init::kCopyValue, 0.0}};
    for (size_t s = spec.slots.size(); s-- > 0;) {
      slots_.push_back({spec.slots[s].name, dim, SlotSpec::Init::kConstant, spec.slots[s].initial});
      columns_.insert(columns_.begin(), static_cast<int>(slots_.size()));
    }
    Initializer initializer;
    initializer.kind = Initializer::Kind::kUniform;
    initializer.a = -1.0;
    initializer.b = 1.0;
    initializer.seed = 5;
    TableOptions cpu;
    cpu.value_type = value_type;
    cpu.dim = dim;
    cpu.initializer = initializer;
    cpu.slots = slots_;
    cpu.shards = 2;
    cpu_ = Table::Create(cpu);
    DeviceTableOptions device;
    device.name = spec.name;
    device.value_type = value_type;
    device.dim = dim;
    device.initializer = initializer;
    device.slots = slots_;
    device_ = Make(device);
  }

  // `exact`: of gradients whose sums are exact, so that they are the same in any order.
  void Run(int rounds, size_t n, uint64_t different, bool exact = false) {
    exact_ = exact;
    for (int round = 0; round < rounds; ++round) {
      const bool distinct = round == 2;
      Array<int64_t> keys(n);
      for (size_t i = 0; i < n; ++i) {
        // Some keys often; in each round some that are new.
        const uint64_t k = distinct ? i * 2 : std::min(Next(different), Next(different));
        keys[i] = static_cast<int64_t>(Mix64(k + static_cast<uint64_t>(round) * (different / 8)));
      }
      Update update = UpdateFor(spec_, round);
      update.skip_nonfinite = round == 3;
      update.stochastic_rounding = round % 2 == 1;
      update.seed = static_cast<uint64_t>(round) * 77;
      const Array<char> gradients = Gradients(n, update.skip_nonfinite);
      const Stamp stamp{static_cast<uint32_t>(round), static_cast<uint32_t>(100 + round)};
      cpu_->Apply(keys.data(), nullptr, static_cast<int64_t>(n), gradients.data(), update, columns_, stamp,
                  Pool());
      device_->Apply({keys.data(), static_cast<int64_t>(n), distinct}, gradients.data(), update, columns_,
                     stamp, nullptr);
      Compare(keys);
      if (round == 3) CHECK(cpu_->SkippedUpdates() > 0);
    }
  }

  void MarksEndWhereRowsAreWritten() {
    Array<int64_t> keys(50);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    const int64_t n = static_cast<int64_t>(keys.size());
    const Array<char> rows = Gradients(keys.size(), false);
    Update update = UpdateFor(spec_, 0);
    for (size_t h = 0; h < update.hyperparameters.size(); ++h) {
      if (std::strcmp(spec_.hyperparameters[h].name, "l21") == 0) update.hyperparameters[h] = 1e6;
    }
    const Stamp stamp{1, 1};
    const auto zero_all = [&](int64_t others) {
      cpu_->Apply(keys.data(), nullptr, n, rows.data(), update, columns_, stamp, Pool());
      device_->Apply({keys.data(), n, false}, rows.data(), update, columns_, stamp, nullptr);
      Compare(keys);
      CHECK(device_->ZeroedRows() == n + others);
    };
    zero_all(0);
    cpu_->Upsert(keys.data(), 10, rows.data(), stamp, Pool());
    device_->Upsert({keys.data(), 10, false}, rows.data(), stamp, nullptr);
    Compare(keys);
    cpu_->Accumulate(keys.data() + 10, 5, rows.data(), false, stamp, Pool());
    device_->Accumulate({keys.data() + 10, 5, false}, rows.data(), false, stamp, nullptr);
    Compare(keys);
    CHECK(device_->ZeroedRows() == n - 15);
    // Reading ends no mark; a row that is removed and comes anew has none.
    Array<char> out(rows.size());
    Array<Flag> flags(keys.size());
    cpu_->Remove(keys.data() + 20, 5, Pool());
    cpu_->GatherOrInsert(keys.data() + 15, 10, out.data(), stamp, Bools(&flags), Pool());
    device_->Remove({keys.data() + 20, 5, false}, nullptr);
    CHECK(device_->ZeroedRows() == n - 20);
    device_->GatherOrInsert({keys.data() + 15, 10, false}, out.data(), stamp, Bools(&flags), nullptr);
    Compare(keys);
    // Rows that come as zeros are marked; of equal keys the last counts.
    Array<int64_t> imported = {100, 101, 100, 102, 102};
    Array<char> values(imported.size() * static_cast<size_t>(dim_ * SizeOf(value_type_)));
    std::memcpy(values.data(), rows.data(), values.size() / 5);                          // 100: then zeros
    std::memcpy(values.data() + values.size() / 5 * 4, rows.data(), values.size() / 5);  // 102: at last
    const std::vector<ColumnIn> in = {{0, values.data(), dim_}};
    cpu_->Import(imported.data(), 5, in, nullptr, nullptr, nullptr, Pool());
    device_->Import({imported.data(), 5, false}, in, nullptr, nullptr, nullptr, nullptr);
    Compare(imported);
    zero_all(2);
    device_->Clear(nullptr);
    CHECK(device_->ZeroedRows() == 0);
  }

 private:
  uint64_t Next(uint64_t below) { return Mix64(++seed_) % below; }

  Array<char> Gradients(size_t n, bool with_nonfinite) {
    const size_t width = static_cast<size_t>(dim_);
    Array<char> gradients(n * width * static_cast<size_t>(SizeOf(value_type_)));
    VisitValueType(value_type_, [&](auto t) {
      using T = decltype(t);
      for (size_t i = 0; i < n * width; ++i) {
        double x = (static_cast<double>(Next(1 << 20)) - (1 << 19)) / (1 << 19);
        if (exact_) x = (static_cast<double>(Next(17)) - 8) / 16;
        if (with_nonfinite && Next(12 * width) == 0) {
          x = Next(2) == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
        }
        const T element = Element<T>::FromDouble(x);
        std::memcpy(&gradients[i * sizeof(T)], &element, sizeof(T));
      }
    });
    return gradients;
  }

  void Compare(const Array<int64_t>& keys) {
    CHECK(cpu_->Size() == device_->Size());
    CHECK(cpu_->SkippedUpdates() == device_->SkippedUpdates());
    CHECK(cpu_->ZeroedRows() == device_->ZeroedRows());
    const int64_t n = static_cast<int64_t>(keys.size());
    const DeviceKeys batch{keys.data(), n, false};
    std::vector<Array<char>> rows[2];
    Array<uint32_t> stamps[2][2];
    Array<Flag> flags[2][2];
    for (int side = 0; side < 2; ++side) {
      std::vector<ColumnOut> out;
      rows[side].resize(1 + slots_.size());
      for (size_t c = 0; c <= slots_.size(); ++c) {
        const int64_t width = c == 0 ? dim_ : slots_[c - 1].width;
        rows[side][c].resize(keys.size() * static_cast<size_t>(width * SizeOf(value_type_)));
        out.push_back({static_cast<int>(c), rows[side][c].data(), width});
      }
      for (auto& column : stamps[side]) column.resize(keys.size());
      for (auto& column : flags[side]) column.resize(keys.size());
      if (side == 0) {
        cpu_->GatherColumns(keys.data(), n, out, Bools(&flags[0][0]), Pool());
        cpu_->GatherStamps(keys.data(), n, stamps[0][0].data(), stamps[0][1].data(), Pool());
        cpu_->Zeroed(keys.data(), n, Bools(&flags[0][1]), Pool());
      } else {
        device_->GatherColumns(batch, out, Bools(&flags[1][0]), nullptr);
        device_->GatherStamps(batch, stamps[1][0].data(), stamps[1][1].data(), nullptr);
        device_->Zeroed(batch, Bools(&flags[1][1]), nullptr);
      }
    }
    Finish();
    for (int f = 0; f < 2; ++f) {
      CHECK(std::equal(Bools(&flags[0][f]), Bools(&flags[0][f]) + n, Bools(&flags[1][f])));
      CHECK(stamps[0][f] == stamps[1][f]);
    }
    for (size_t c = 0; c <= slots_.size(); ++c) {
      if (SameElements(value_type_, rows[0][c], rows[1][c])) continue;
      std::fprintf(stderr, "%s, value type %d, dim %d: column %zu differs\n", spec_.name,
                   static_cast<int>(value_type_), static_cast<int>(dim_), c);
      CHECK(false);
    }
  }

  const OptimizerSpec& spec_;
  const ValueType value_type_;
  const int64_t dim_;
  uint64_t seed_;
  bool exact_ = false;
  std::vector<SlotSpec> slots_;
  std::vector<int> columns_;  // of the rule's slots
  std::unique_ptr<Table> cpu_;
  std::unique_ptr<DeviceTable> device_;
};

constexpr ValueType kTypes[] = {ValueType::kFloat32, ValueType::kFloat16, ValueType::kBFloat16,
                                ValueType::kFloat64};

void EveryOptimizerDoesWhatItDoesOnTheCpu() {
  // Of a row that lanes share, 40 elements are in registers at once or in two pieces; 70, in memory or in three.
#if defined(KVTABLE_TEST_CUDA)
  const std::vector<int64_t> dims = {1, 3, 16, 40, 64, 70};
#elif defined(KVTABLE_TEST_WARPS)
  const std::vector<int64_t> dims = {3, 40, 70};
#else
  const std::vector<int64_t> dims = {1, 3, 16, 40};
#endif
  for (const OptimizerSpec& spec : Optimizers()) {
    for (const ValueType type : kTypes) {
      for (const int64_t dim : dims) Pair(spec, type, dim).Run(4, 90, 40);
    }
  }
}

void ManyThreadsShareALargeBatch() {
  for (const char* name : {"adam", "group_adam"}) {
    for (const ValueType type : {ValueType::kFloat32, ValueType::kBFloat16}) {
      Pair(FindOptimizer(name), type, 8).Run(4, 12000, 3000);
    }
  }
}

// Their gradients are summed in chunks by several tiles. Rows that begin and end in the middle of a chunk, where one
// begins, and in the first one of all; with one row, all of a batch.
void RowsThatOccurVeryOften() {
  for (const char* name : {"sgd", "adam", "group_adam"}) {
    for (const ValueType type : kTypes) {
      const OptimizerSpec& spec = FindOptimizer(name);
      for (const uint64_t different : {1, 3, 8, 40}) {
        for (const size_t n : {511, 512, 700}) Pair(spec, type, 5).Run(4, n, different, true);
      }
    }
  }
}

// Rows of plain arrays, which may be cut into others, and what is left to the CPU.
void ArraysAreUpdatedAsOnTheCpu() {
  const std::unique_ptr<DeviceWork> work = MakeWork();
  uint64_t state = 9;
  const auto random = [&](ValueType type, int64_t n, bool positive) {
    Array<char> array(static_cast<size_t>(n * SizeOf(type)));
    VisitValueType(type, [&](auto t) {
      using T = decltype(t);
      for (int64_t i = 0; i < n; ++i) {
        const double x = static_cast<double>(Mix64(++state) >> 11) * 0x1p-53;
        const T element = Element<T>::FromDouble(positive ? x : 2 * x - 1);
        std::memcpy(&array[static_cast<size_t>(i) * sizeof(T)], &element, sizeof(T));
      }
    });
    return array;
  };
  for (const OptimizerSpec& spec : Optimizers()) {
    for (const ValueType type : kTypes) {
      int round = 0;
      for (const auto& [n, dim] : std::vector<std::pair<int64_t, int64_t>>{
               {0, 5}, {1, 1}, {3, 7}, {1, 64}, {1, 300}, {40, 70}, {1, 65537}}) {
        if (dim > 300 && (type != ValueType::kFloat32 || spec.slots.size() > 2)) continue;
        Update update = UpdateFor(spec, ++round % 2);
        update.stochastic_rounding = round % 3 == 0;
        update.seed = static_cast<uint64_t>(round);
        const Array<char> gradients = random(type, n * dim, false);
        std::vector<Array<char>> sides[2];
        std::vector<void*> columns[2];
        for (size_t c = 0; c <= spec.slots.size(); ++c) {
          sides[0].push_back(random(type, n * dim, c > 0));
          sides[1].push_back(sides[0].back());
        }
        for (int side = 0; side < 2; ++side) {
          for (Array<char>& column : sides[side]) columns[side].push_back(column.data());
        }
        const bool updated = work->ApplyToArrays(update, type, dim, columns[1], n, gradients.data(), nullptr);
        CHECK(updated || dim > 300);
        if (!updated) continue;
        ApplyToArrays(update, type, dim, columns[0], nullptr, n, gradients.data(), Pool());
        Finish();
        for (size_t c = 0; c < sides[0].size(); ++c) CHECK(SameElements(type, sides[0][c], sides[1][c]));
      }
    }
  }
  Update update = UpdateFor(FindOptimizer("sgd"), 0);
  float row[2] = {1, 2};
  update.skip_nonfinite = true;
  CHECK(!work->ApplyToArrays(update, ValueType::kFloat32, 2, {row}, 1, row, nullptr));
  CHECK(row[0] == 1 && row[1] == 2);
  try {
    work->ApplyToArrays(update, ValueType::kFloat32, 2, {row, row}, 1, row, nullptr);
    CHECK(!"a column too many");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
  }
}

void MarksOfZeroRows() {
  for (const ValueType type : kTypes) {
    Pair(FindOptimizer("group_adam"), type, 5).MarksEndWhereRowsAreWritten();
  }
}

template <class Work>
std::string ErrorOf(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void MistakesAreErrorsAndChangeNothing() {
  DeviceTableOptions options;
  options.name = "t";
  options.dim = 4;
  options.slots = {{"m", 4, SlotSpec::Init::kConstant, 0.0}, {"narrow", 2, SlotSpec::Init::kConstant, 0.0}};
  const std::unique_ptr<DeviceTable> table = Make(options);
  const Array<int64_t> key = {1};
  const Array<float> gradient(4);
  const auto apply = [&](DeviceTable* to, const Update& update, const std::vector<int>& slots) {
    return ErrorOf([&] { to->Apply({key.data(), 1, false}, gradient.data(), update, slots, {}, nullptr); });
  };
  const Update momentum = MakeUpdate("momentum", {{"learning_rate", 0.1}});
  CHECK(apply(table.get(), momentum, {}).find("keeps 1 slots; got columns for 0") != std::string::npos);
  CHECK(apply(table.get(), momentum, {2}).find("2 elements wide") != std::string::npos);
  CHECK(apply(table.get(), momentum, {3}).find("no column 3") != std::string::npos);
  Update wrong = momentum;
  wrong.hyperparameters[1] = -1.0;
  CHECK(apply(table.get(), wrong, {1}).find("weight_decay = -1") != std::string::npos);
  CHECK(table->Size() == 0);
  options.value_type = ValueType::kInt32;
  const std::unique_ptr<DeviceTable> integers = Make(options);
  CHECK(apply(integers.get(), MakeUpdate("sgd", {{"learning_rate", 0.1}}), {}).find("not trained") !=
        std::string::npos);
  CHECK(integers->Size() == 0);
}

#if !defined(KVTABLE_TEST_CUDA)
// A step takes memory in many places; wherever it ends, no row has come or changed.
void OutOfMemoryChangesNothing() {
  DeviceTableOptions options;
  options.name = "t";
  options.dim = 16;
  const OptimizerSpec& spec = FindOptimizer("group_adam");
  std::vector<int> columns;
  for (const OptimizerSlot& slot : spec.slots) {
    options.slots.push_back({slot.name, options.dim, SlotSpec::Init::kConstant, slot.initial});
    columns.push_back(static_cast<int>(options.slots.size()));
  }
  Update update = UpdateFor(spec, 0);
  update.skip_nonfinite = true;
  const int64_t n = 3000;
  std::vector<int64_t> keys(static_cast<size_t>(n));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i / 2);
  const std::vector<float> gradients(keys.size() * 16, 0.5f);
  int failures = 0;
  for (size_t memory = 1000000;; memory += 10000) {
    const std::unique_ptr<DeviceTable> table = Make(options, memory);
    const float value[16] = {7.0f};
    const auto upsert = [&] { table->Upsert({keys.data(), 1, true}, value, {}, nullptr); };
    if (!ErrorOf(upsert).empty()) continue;
    const std::string error = ErrorOf(
        [&] { table->Apply({keys.data(), n, false}, gradients.data(), update, columns, {1, 1}, nullptr); });
    if (error.empty()) {
      CHECK(table->Size() == n / 2);
      break;
    }
    ++failures;
    CHECK(error.find("Table 't' could not get") != std::string::npos);
    CHECK(table->Size() == 1);
    float now[16];
    table->Gather({keys.data(), 1, true}, now, Missing::kZeros, nullptr, 0, nullptr, nullptr);
    CHECK(std::memcmp(now, value, sizeof(now)) == 0);
  }
  CHECK(failures > 3);
}
#endif

}  // namespace
}  // namespace kvtable

int main() {
#if defined(KVTABLE_TEST_CUDA)
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("There is no CUDA device: nothing ran.");
    return 0;
  }
#endif
  kvtable::EveryOptimizerDoesWhatItDoesOnTheCpu();
  kvtable::ManyThreadsShareALargeBatch();
  kvtable::RowsThatOccurVeryOften();
  kvtable::ArraysAreUpdatedAsOnTheCpu();
  kvtable::MarksOfZeroRows();
  kvtable::MistakesAreErrorsAndChangeNothing();
#if !defined(KVTABLE_TEST_CUDA)
  kvtable::OutOfMemoryChangesNothing();
#endif
  return 0;
}
