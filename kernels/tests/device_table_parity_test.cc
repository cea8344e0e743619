// The same operations on the CPU's table and on the table in device memory, run on threads: the same rows,
// stamps and flags come back, bit for bit, for every key type and value type.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../cuda/threads_table.h"
#include "base/hash.h"
#include "check.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"
#include "kvtable/pool_rows.h"
#include "kvtable/table.h"
#include "values/elements.h"

namespace kvtable {
namespace {

template <class Key>
class Pair {
 public:
  Pair(KeyType key_type, ValueType value_type, int64_t dim, const Initializer& initializer)
      : pool_(MakeThreadPool(2)), value_type_(value_type), dim_(dim) {
    TableOptions cpu;
    cpu.key_type = key_type;
    cpu.value_type = value_type;
    cpu.dim = dim;
    cpu.initializer = initializer;
    cpu.slots = Slots();
    cpu.shards = 2;
    cpu_ = Table::Create(cpu);
    DeviceTableOptions device;
    device.key_type = key_type;
    device.value_type = value_type;
    device.dim = dim;
    device.initializer = initializer;
    device.slots = Slots();
    device_ = MakeThreadsTable(device, pool_.get());
  }

  void Run(uint64_t seed, int rounds) {
    uint64_t state = seed;
    const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
    for (int round = 0; round < rounds; ++round) {
      const size_t n = 1 + next(700);
      std::vector<Key> keys(n);
      for (Key& key : keys) {
        const uint64_t bits = Mix64(next(400));  // of any size, and often the same
        key = static_cast<Key>(bits >> next(2) * 40);
      }
      const std::vector<char> rows = Rows(n, &state);
      const DeviceKeys batch{keys.data(), static_cast<int64_t>(n), false};
      const int64_t count = batch.n;
      const Stamp stamp{static_cast<uint32_t>(next(3)), static_cast<uint32_t>(round)};
      std::vector<char> a(rows.size());
      std::vector<char> b(rows.size());
      const auto flags_a = std::make_unique<bool[]>(n);
      const auto flags_b = std::make_unique<bool[]>(n);
      switch (next(7)) {
        case 0:
          cpu_->GatherOrInsert(keys.data(), count, a.data(), stamp, flags_a.get(), *pool_);
          device_->GatherOrInsert(batch, b.data(), stamp, flags_b.get(), nullptr);
          break;
        case 1:
          cpu_->Upsert(keys.data(), count, rows.data(), stamp, *pool_);
          device_->Upsert(batch, rows.data(), stamp, nullptr);
          break;
        case 2:
          cpu_->Accumulate(keys.data(), count, rows.data(), round % 2 == 0, stamp, *pool_);
          device_->Accumulate(batch, rows.data(), round % 2 == 0, stamp, nullptr);
          break;
        case 3:
          cpu_->Remove(keys.data(), count / 3, *pool_);
          device_->Remove({keys.data(), count / 3, false}, nullptr);
          break;
        case 4: {
          const Missing missing = static_cast<Missing>(next(3));
          cpu_->Gather(keys.data(), count, a.data(), missing, rows.data(), 1 + count / 2, flags_a.get(),
                       *pool_);
          device_->Gather(batch, b.data(), missing, rows.data(), 1 + count / 2, flags_b.get(), nullptr);
          break;
        }
        case 5: {
          const std::vector<ColumnIn> in = {{2, rows.data(), dim_}};
          std::vector<uint32_t> stamps(n);
          for (uint32_t& x : stamps) x = static_cast<uint32_t>(next(5));
          cpu_->Import(keys.data(), count, in, stamps.data(), nullptr, nullptr, *pool_);
          device_->Import(batch, in, stamps.data(), nullptr, nullptr, nullptr);
          break;
        }
        default: {
          const std::vector<ColumnIn> in = {{2, rows.data(), dim_}, {0, rows.data(), dim_}};
          cpu_->UpsertColumns(keys.data(), count, in, stamp, *pool_);
          device_->UpsertColumns(batch, in, stamp, nullptr);
          break;
        }
      }
      CHECK(a == b);
      CHECK(std::equal(flags_a.get(), flags_a.get() + n, flags_b.get()));
      Compare(keys);
    }
  }

  // Pooled lookups of every combiner, with weights and without, over bags of any length.
  void RunPooled(uint64_t seed) {
    VisitValueType(value_type_, [&](auto t) { RunPooledAs<decltype(t)>(seed); });
  }

 private:
  template <class T>
  void RunPooledAs(uint64_t seed) {
    using Weight = typename Element<T>::Compute;
    uint64_t state = seed;
    const auto next = [&](uint64_t below) { return Mix64(++state) % below; };
    for (int round = 0; round < 12; ++round) {
      std::vector<int64_t> splits = {0};
      for (int bag = 0; bag < 60; ++bag)
        splits.push_back(splits.back() + static_cast<int64_t>(next(4) * next(6)));
      const size_t n = static_cast<size_t>(splits.back());
      std::vector<Key> keys(n);
      for (Key& key : keys) key = static_cast<Key>(Mix64(next(200)));
      std::vector<Weight> weights(n);
      for (Weight& weight : weights)
        weight = static_cast<Weight>(next(5)) / 2 - 1;  // zero and negative ones, too
      const bool weighted = round % 2 == 0;
      const Combiner combiner = static_cast<Combiner>(round % 3);

      BagsInput input;
      input.key_type = cpu_->key_type();
      input.value_type = value_type_;
      input.keys = keys.data();
      input.n = static_cast<int64_t>(n);
      input.bags = 60;
      input.splits = splits.data();
      input.weights = weighted ? weights.data() : nullptr;
      const Bags bags(input);
      MissingKeys missing;
      missing.insert = round % 4 == 0;
      missing.missing = round % 4 == 1 ? Missing::kZeros : Missing::kInitial;
      std::vector<T> a(static_cast<size_t>(60 * dim_));
      std::vector<T> b(a.size());
      PoolRows({{{cpu_.get()}, &bags, combiner, a.data(), missing}}, *pool_);
      const DeviceBags on_device{splits.data(), 60, input.weights, combiner};
      if (missing.insert) {
        device_->GatherPooledOrInsert({keys.data(), input.n, false}, on_device, {}, b.data(), nullptr);
      } else {
        device_->GatherPooled({keys.data(), input.n, false}, on_device, missing.missing, b.data(), nullptr);
      }
      CHECK(cpu_->Size() == device_->Size());
      const auto same = [](const T& x, const T& y) {
        const Weight u = Element<T>::Load(x);
        const Weight v = Element<T>::Load(y);
        return u == v || (u != u && v != v);  // roots of negative numbers are none
      };
      for (size_t i = 0; i < a.size(); ++i) CHECK(same(a[i], b[i]));

      // The gradient of the weights: nothing was inserted since, so both find the same rows.
      if (weighted) {
        std::vector<Weight> of_weights[2] = {std::vector<Weight>(n), std::vector<Weight>(n)};
        if (missing.insert) missing.missing = Missing::kZeros;
        PoolWeightsGradient(
            {{{cpu_.get()}, &bags, combiner, a.data(), b.data(), of_weights[0].data(), missing}}, *pool_);
        device_->WeightsGradient({keys.data(), input.n, false}, on_device, missing.missing, a.data(),
                                 b.data(), of_weights[1].data(), nullptr);
        for (size_t i = 0; i < n; ++i) {
          const Weight x = of_weights[0][i];
          const Weight y = of_weights[1][i];
#if defined(KVTABLE_TEST_WARPS)
          const bool same =
              std::abs(x - y) <= Weight(1e-4) * (1 + std::abs(x));  // lanes add in another order
#else
          const bool same = x == y;
#endif
          CHECK(same || (x != x && y != y));
        }
      }

      // The gradient of each key's row, against one bag at a time.
      std::vector<T> spread(n * static_cast<size_t>(dim_));
      device_->SpreadGradient(on_device, a.data(), spread.data(), nullptr);
      for (int64_t bag = 0; bag < 60; ++bag) {
        const Weight divisor = bags.Divisor<Weight>(bag, combiner);
        for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
          const Weight weight = weighted ? weights[static_cast<size_t>(i)] : 1;
          for (int64_t j = 0; j < dim_; ++j) {
            const Weight gradient = Element<T>::Load(a[static_cast<size_t>(bag * dim_ + j)]);
            const T expected = Element<T>::Store(divisor == 0 ? 0 : weight / divisor * gradient);
            CHECK(same(spread[static_cast<size_t>(i * dim_ + j)], expected));
          }
        }
      }
    }
  }

  // What is there of these keys, in every column.
  void Compare(const std::vector<Key>& keys) {
    CHECK(cpu_->Size() == device_->Size());
    const int64_t n = static_cast<int64_t>(keys.size());
    std::vector<char> columns[2][4];
    std::vector<uint32_t> stamps[2][2];
    for (int side = 0; side < 2; ++side) {
      std::vector<ColumnOut> out;
      for (int c = 0; c < 4; ++c) {
        const int64_t width = c == 1 ? 3 : dim_;
        columns[side][c].resize(keys.size() * static_cast<size_t>(width * SizeOf(value_type_)));
        out.push_back({c, columns[side][c].data(), width});
      }
      for (auto& column : stamps[side]) column.resize(keys.size());
      if (side == 0) {
        cpu_->GatherColumns(keys.data(), n, out, nullptr, *pool_);
        cpu_->GatherStamps(keys.data(), n, stamps[0][0].data(), stamps[0][1].data(), *pool_);
      } else {
        device_->GatherColumns({keys.data(), n, false}, out, nullptr, nullptr);
        device_->GatherStamps({keys.data(), n, false}, stamps[1][0].data(), stamps[1][1].data(), nullptr);
      }
    }
    for (int c = 0; c < 4; ++c) CHECK(columns[0][c] == columns[1][c]);
    for (int c = 0; c < 2; ++c) CHECK(stamps[0][c] == stamps[1][c]);
  }

  std::vector<SlotSpec> Slots() const {
    return {{"narrow", 3, SlotSpec::Init::kConstant, 1.0},
            {"copy", dim_, SlotSpec::Init::kCopyValue, 0.0},
            {"wide", dim_, SlotSpec::Init::kConstant, value_type_ == ValueType::kBool ? 1.0 : 2.0}};
  }

  // Small whole numbers, whose sums are exact in every type and order.
  std::vector<char> Rows(size_t n, uint64_t* state) const {
    std::vector<char> rows(n * static_cast<size_t>(dim_ * SizeOf(value_type_)));
    VisitAnyValueType(value_type_, [&](auto t) {
      using T = decltype(t);
      for (size_t i = 0; i < rows.size() / sizeof(T); ++i) {
        const T x = Element<T>::FromDouble(static_cast<double>(Mix64(++*state) % 2));
        std::memcpy(&rows[i * sizeof(T)], &x, sizeof(T));
      }
    });
    return rows;
  }

  const std::unique_ptr<ParallelFor> pool_;
  const ValueType value_type_;
  const int64_t dim_;
  std::unique_ptr<Table> cpu_;
  std::unique_ptr<DeviceTable> device_;
};

}  // namespace
}  // namespace kvtable

int main() {
  using kvtable::Initializer;
  using kvtable::KeyType;
  using kvtable::ValueType;
  uint64_t seed = 0;
  for (const auto type : {ValueType::kFloat32, ValueType::kFloat16, ValueType::kBFloat16, ValueType::kFloat64,
                          ValueType::kInt8, ValueType::kInt32, ValueType::kInt64, ValueType::kBool}) {
    // Sums that start from a drawn value differ in their last bits with the order: a row of whole numbers is
    // exact.
    Initializer initializer;
    initializer.a = 1.0;
    for (const int64_t dim : {1, 7, 16}) {
      kvtable::Pair<int64_t>(KeyType::kInt64, type, dim, initializer).Run(++seed << 32, 25);
      kvtable::Pair<int32_t>(KeyType::kInt32, type, dim, initializer).Run(++seed << 32, 10);
      kvtable::Pair<uint64_t>(KeyType::kUint64, type, dim, initializer).Run(++seed << 32, 10);
      if (!kvtable::IsFloating(type)) continue;
      Initializer drawn = initializer;
      drawn.kind = Initializer::Kind::kUniform;
      drawn.b = 2.0;
      kvtable::Pair<int64_t>(KeyType::kInt64, type, dim, drawn).RunPooled(++seed << 32);
      kvtable::Pair<int32_t>(KeyType::kInt32, type, dim, initializer).RunPooled(++seed << 32);
    }
  }
  return 0;
}
