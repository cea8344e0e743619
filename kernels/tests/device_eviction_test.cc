// Bounded tables in device memory, beside the CPU's with the same clock: the same rows go, in the same order,
// and what stays has the same scores, stamps and values. On threads, on emulated warps (KVTABLE_TEST_WARPS) or, compiled
// with KVTABLE_TEST_CUDA, on a GPU.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "device_arrays.h"
#include "eviction/eviction_score.h"
#include "kvtable/device_table.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "throws.h"
#include "values/elements.h"

#if !defined(KVTABLE_TEST_CUDA)
#include "../cuda/threads_table.h"
#endif

namespace kvtable {
namespace {

constexpr Eviction kEvictions[] = {Eviction::kLru, Eviction::kLfu, Eviction::kCustom, Eviction::kEpochLru,
                                   Eviction::kEpochLfu};

ParallelFor& Pool() {
  static const auto pool = MakeThreadPool(2);
  return *pool;
}

#if defined(KVTABLE_TEST_CUDA)
std::unique_ptr<DeviceTable> MakeTable(const DeviceTableOptions& options, bool /*misleading*/) {
  return MakeCudaTable(options);
}
#else
// `misleading`: samples and lists so small that they say little.
std::unique_ptr<DeviceTable> MakeTable(const DeviceTableOptions& options, bool misleading,
                                       size_t memory = SIZE_MAX) {
  EvictionTuning tuning;
  if (misleading) {
    tuning.rows_per_sample = 500;
    tuning.least_below_bound = 0;
    tuning.batches_listed = 0;
    tuning.most_close = 2;
  }
  return MakeThreadsTable(options, &Pool(), memory, tuning);
}
#endif

struct Row {
  uint64_t score = 0;
  uint32_t frequency = 0;
  uint32_t version = 0;
  std::vector<float> values;  // the slot behind it

  friend bool operator==(const Row& a, const Row& b) {
    return a.score == b.score && a.frequency == b.frequency && a.version == b.version && a.values == b.values;
  }
};
using Rows = std::map<uint64_t, Row>;

// What the CPU's table hands out.
template <class Key>
class Evicted : public EvictedRows {
 public:
  explicit Evicted(int64_t dim) : dim_(static_cast<size_t>(dim)) {}
  void Allocate(int64_t n, void** keys_out, void** values_out) override {
    keys.resize(static_cast<size_t>(n));
    values.resize(keys.size() * dim_);
    *keys_out = keys.data();
    *values_out = values.data();
  }
  Array<Key> keys;
  Array<float> values;

 private:
  size_t dim_;
};

struct Shape {
  Eviction eviction;
  int64_t capacity;
  int64_t dim;
  uint64_t most_keys;  // of a batch
  uint64_t key_space;
};

template <class Key>
class Both {
 public:
  Both(KeyType key_type, const Shape& shape, bool misleading = false)
      : shape_(shape), dim_(shape.dim), misleading_(misleading) {
    TableOptions& cpu = cpu_options_;
    cpu.key_type = key_type;
    cpu.dim = dim_;
    cpu.initializer = Starts();
    cpu.slots = {{"m", dim_, SlotSpec::Init::kConstant, 3.0}};
    cpu.shards = 4;
    cpu.max_capacity = shape.capacity;
    cpu.eviction = shape.eviction;
    cpu.clock = [this] { return now_; };
    cpu_ = Table::Create(cpu);
    DeviceTableOptions& device = device_options_;
    device.name = "bounded";
    device.key_type = key_type;
    device.dim = dim_;
    device.initializer = cpu.initializer;
    device.slots = cpu.slots;
    device.max_capacity = shape.capacity;
    device.eviction = shape.eviction;
    device.clock = cpu.clock;
    device_ = MakeTable(device, misleading);
  }

  // `restores`: now and then one of the two is made anew of what the other gives, and goes on.
  void Run(uint64_t seed, int rounds, bool restores = false) {
    state_ = seed;
    restores_ = restores;
    Fill();
    for (int round = 0; round < rounds; ++round) {
      // Time stands still, goes on, or back.
      now_ += Next(3) * Next(1500000);
      if (Next(20) == 0) now_ -= 1000000;
      Step(static_cast<uint32_t>(round));
      if (round % 4 == 0 || shape_.capacity < 100) Compare();
      if (restores && round % 5 == 2) RestoreOne(round % 2 == 0);
    }
    Compare();
  }

 private:
  static Initializer Starts() {
    Initializer starts;
    starts.kind = Initializer::Kind::kConstant;
    starts.a = 2.0;
    return starts;
  }

  static bool AreEqual(const Array<Flag>& a, const Array<Flag>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), [](Flag x, Flag y) { return x.is_set == y.is_set; });
  }

  uint64_t Next(uint64_t below) { return Mix64(++state_) % below; }

  void Compare() {
    const Rows rows = CpuRows();
    CHECK(DeviceRows() == rows);
    CHECK(device_->Size() == static_cast<int64_t>(rows.size()) && device_->Size() <= shape_.capacity);
    CHECK(device_evicted_ + device_->EvictedCount() == cpu_evicted_ + cpu_->EvictedCount());
  }

  // Rows come in another order than they went.
  void RestoreOne(bool of_cpu) {
    now_ += 100000000;  // later than any batch: the clock is not among what is exported
    Chunk chunk(dim_);
    const std::vector<ColumnIn> in = {{0, chunk.values.data(), dim_}, {1, chunk.slots.data(), dim_}};
    if (of_cpu) {
      cpu_evicted_ += cpu_->EvictedCount();
      cpu_ = Table::Create(cpu_options_);
      const auto out = chunk.template To<DeviceExporter::Buffers>(dim_);
      const auto exporter = device_->Export({});
      for (int64_t n; (n = exporter->Next(Chunk::kRows, out, nullptr)) > 0;) {
        cpu_->Import(chunk.keys.data(), n, in, chunk.freqs.data(), chunk.versions.data(),
                     {chunk.scores.data(), chunk.orders.data()}, Pool());
      }
      if (HasEpochs(shape_.eviction)) cpu_->SetEpoch(epoch_);
      return;
    }
    device_evicted_ += device_->EvictedCount();
    device_ = MakeTable(device_options_, misleading_);
    const auto out = chunk.template To<Exporter::Buffers>(dim_);
    const auto exporter = cpu_->Export();
    for (int64_t n; (n = exporter->Next(Chunk::kRows, out, Serial())) > 0;) {
      RanksIn ranks(chunk.scores.data(), chunk.orders.data());
      ranks.highest_order = *std::max_element(chunk.orders.begin(), chunk.orders.begin() + n);
      device_->Import({chunk.keys.data(), n, true}, in, chunk.freqs.data(), chunk.versions.data(), ranks,
                      nullptr);
      Finish();
    }
    if (HasEpochs(shape_.eviction)) device_->SetEpoch(epoch_);
  }

  // Up to the capacity, with scores of all kinds.
  void Fill() {
    Array<Key> keys(static_cast<size_t>(shape_.capacity));
    for (Key& key : keys) key = KeyOf(Next(shape_.key_space));
    const Array<float> rows(keys.size() * static_cast<size_t>(dim_), 1.0f);
    const Array<uint64_t> scores = Scores(keys.size());
    const int64_t n = shape_.capacity;
    cpu_->Import(keys.data(), n, {{0, rows.data(), dim_}}, nullptr, nullptr, scores.data(), Pool());
    device_->Import({keys.data(), n, false}, {{0, rows.data(), dim_}}, nullptr, nullptr, scores.data(),
                    nullptr);
    Finish();
  }

  static Key KeyOf(uint64_t number) {
    switch (number) {
      case 0:
        return 0;
      case 1:
        return static_cast<Key>(-1);
      case 2:
        return std::numeric_limits<Key>::min();
      case 3:
        return std::numeric_limits<Key>::max();
    }
    return static_cast<Key>(Mix64(number));
  }

  Array<Key> Keys() {
    const uint64_t kind = Next(10);
    size_t n =
        kind == 0 ? 0 : 1 + Next(kind < 6 ? std::max<uint64_t>(1, shape_.most_keys / 8) : shape_.most_keys);
    Array<Key> keys(n);
    for (Key& key : keys)
      key = KeyOf(Next(2) == 0 ? Next(shape_.key_space) : Next(1 + shape_.key_space / 16));
    return keys;
  }

  Array<uint64_t> Scores(size_t n) {
    Array<uint64_t> scores(n);
    for (uint64_t& score : scores) {
      score = Next(10) == 0 && !restores_ ? UINT64_MAX - Next(2) : Next(6) << (Next(2) * 40);
    }
    return scores;
  }

  void Step(uint32_t round) {
    Array<Key> keys = Keys();
    const size_t n = keys.size();
    const int64_t count = static_cast<int64_t>(n);
    const size_t width = static_cast<size_t>(dim_);
    DeviceKeys batch{keys.data(), count, false};
    if (std::set<Key>(keys.begin(), keys.end()).size() == n) batch.distinct = Next(2) == 0;
    Array<float> rows(n * width);
    for (float& x : rows) x = static_cast<float>(Next(64));
    const Stamp stamp{static_cast<uint32_t>(Next(3)), round};
    Array<float> a(n * width);
    Array<float> b(n * width);
    Array<Flag> flags_a(n);
    Array<Flag> flags_b(n);
    const bool custom = shape_.eviction == Eviction::kCustom;
    switch (Next(13)) {
      case 0:
      case 1:
      case 2: {
        Evicted<Key> gone(dim_);
        Insertion insertion;
        insertion.stamp = stamp;
        insertion.inserted = Bools(&flags_a);
        insertion.admission = Next(2) == 0 ? 1.0 : 0.4;
        insertion.admission_seed = round / 4;
        insertion.evicted = &gone;
        cpu_->GatherOrInsert(keys.data(), count, a.data(), insertion, Pool());
        const Rows before = DeviceRows();
        Out out(n, width);
        DeviceInsertion same;
        same.stamp = stamp;
        same.inserted = Bools(&flags_b);
        same.admission = insertion.admission;
        same.admission_seed = insertion.admission_seed;
        same.evicted = &out.evicted;
        if (Next(4) == 0) out.evicted.capacity = static_cast<int64_t>(Next(n + 1));
        device_->GatherOrInsert(batch, b.data(), same, nullptr);
        Finish();
        CHECK(AreEqual(flags_a, flags_b));
        CHECK(out.count() == gone.keys.size());
        const size_t written = std::min<size_t>(out.count(), static_cast<size_t>(out.evicted.capacity));
        CHECK(std::equal(out.keys.begin(), out.keys.begin() + static_cast<ptrdiff_t>(written),
                         gone.keys.begin()));
        CHECK(std::equal(out.values.begin(), out.values.begin() + static_cast<ptrdiff_t>(written * width),
                         gone.values.begin()));
        CheckScores(before, keys, out, written);
        break;
      }
      case 3:
        cpu_->Upsert(keys.data(), count, rows.data(), stamp, Pool());
        device_->Upsert(batch, rows.data(), stamp, nullptr);
        break;
      case 4:
        cpu_->Accumulate(keys.data(), count, rows.data(), round % 2 == 0, stamp, Pool());
        device_->Accumulate(batch, rows.data(), round % 2 == 0, stamp, nullptr);
        break;
      case 5: {
        Update update = MakeUpdate("sgd", {{"learning_rate", 1.0}});  // whole numbers stay whole
        update.skip_nonfinite = Next(2) == 0;
        for (float& x : rows) {
          if (update.skip_nonfinite && Next(10 * width) == 0) x = std::numeric_limits<float>::infinity();
        }
        cpu_->Apply(keys.data(), nullptr, count, rows.data(), update, {}, stamp, Pool());
        device_->Apply(batch, rows.data(), update, {}, stamp, nullptr);
        break;
      }
      case 6:
        cpu_->Remove(keys.data(), count / 2, Pool());
        device_->Remove({keys.data(), count / 2, false}, nullptr);
        break;
      case 7: {
        const Array<uint64_t> scores = Scores(n);
        Array<uint32_t> freqs(n);
        Array<uint32_t> versions(n);
        for (uint32_t& x : freqs) x = static_cast<uint32_t>(Next(5));
        for (uint32_t& x : versions) x = static_cast<uint32_t>(Next(2000));
        const uint64_t* const given = Next(2) == 0 ? scores.data() : nullptr;
        const uint32_t* const seconds = Next(3) == 0 ? nullptr : versions.data();
        const uint32_t* const counts = Next(3) == 0 ? nullptr : freqs.data();
        cpu_->Import(keys.data(), count, {{0, rows.data(), dim_}}, counts, seconds, given, Pool());
        device_->Import(batch, {{0, rows.data(), dim_}}, counts, seconds, given, nullptr);
        break;
      }
      case 8:
      case 9: {
        const Array<uint64_t> scores = Scores(n);
        const Rows before = DeviceRows();
        Out out(n, width);
        cpu_->Upsert(keys.data(), count, rows.data(), stamp, Pool());
        if (custom) cpu_->SetScores(keys.data(), count, scores.data(), Pool());
        device_->InsertAndEvict(batch, rows.data(), custom ? scores.data() : nullptr, stamp, out.evicted,
                                nullptr);
        Finish();
        CHECK(out.count() <= n);
        std::set<Key> all(keys.begin(), keys.end());
        for (const auto& entry : before) all.insert(static_cast<Key>(entry.first));
        CHECK(all.size() - out.count() == static_cast<size_t>(device_->Size()));
        if (!custom || count <= shape_.capacity) CheckScores(before, keys, out, out.count());
        break;
      }
      case 10:
        if (custom) {
          const Array<uint64_t> scores = Scores(n);
          cpu_->SetScores(keys.data(), count, scores.data(), Pool());
          device_->SetScores(batch, scores.data(), nullptr);
        }
        if (HasEpochs(shape_.eviction)) {
          epoch_ = round / 8 + static_cast<uint32_t>(Next(2));
          cpu_->SetEpoch(epoch_);
          device_->SetEpoch(epoch_);
        }
        break;
      case 11: {
        const Array<int64_t> splits = {0, count / 3, count / 3, count};
        const DeviceBags bags{splits.data(), 3, nullptr, Combiner::kSum};
        Array<float> pooled(3 * width);
        Array<float> expected(3 * width);
        cpu_->GatherOrInsert(keys.data(), count, a.data(), stamp, nullptr, Pool());
        device_->GatherPooledOrInsert(batch, bags, stamp, pooled.data(), nullptr);
        Finish();
        for (size_t bag = 0; bag < 3; ++bag) {
          for (int64_t i = splits[bag]; i < splits[bag + 1]; ++i) {
            for (size_t j = 0; j < width; ++j) {
              expected[bag * width + j] += a[static_cast<size_t>(i) * width + j];
            }
          }
        }
        CHECK(pooled == expected);
        b = a;
        break;
      }
      case 12: {
        if (Next(6) == 0) {
          cpu_->Clear();
          device_->Clear(nullptr);
        }
        Array<void*> pointers(n);
        cpu_->GatherOrInsert(keys.data(), count, a.data(), stamp, Bools(&flags_a), Pool());
        device_->PointersOrInsert(batch, pointers.data(), stamp, Bools(&flags_b), nullptr);
        Finish();
        CHECK(AreEqual(flags_a, flags_b));
        b = a;
        break;
      }
    }
    Finish();
    CHECK(a == b);
    CheckScoresOf(keys);
  }

  struct Out {
    Out(size_t n, size_t width) : keys(n), values(n * width), scores(n) {
      evicted.keys = keys.data();
      evicted.values = values.data();
      evicted.scores = scores.data();
      evicted.capacity = static_cast<int64_t>(n);
      evicted.count = counts.data();
    }
    Array<Key> keys;
    Array<float> values;
    Array<uint64_t> scores;
    uint64_t count() const { return counts[0]; }
    Array<uint64_t> counts = {12345};
    DeviceEvicted evicted;
  };

  // Rows that were there before the batch come first, the lowest score first, as they were; then the batch's
  // own.
  void CheckScores(const Rows& before, const Array<Key>& keys, const Out& out, size_t n) {
    const std::set<Key> own(keys.begin(), keys.end());
    bool came_to_own = false;
    for (size_t i = 0; i < n; ++i) {
      const bool is_own = own.count(out.keys[i]) != 0;
      if (is_own) CHECK(static_cast<int64_t>(own.size()) > shape_.capacity);
      CHECK(is_own || !came_to_own);
      came_to_own = is_own;
      if (is_own) continue;
      const Row& row = before.at(Widen(out.keys[i]));
      CHECK(row.score == out.scores[i]);
      CHECK(std::equal(row.values.begin(), row.values.begin() + dim_,
                       out.values.begin() + static_cast<ptrdiff_t>(i) * dim_));
      if (i > 0) CHECK(out.scores[i - 1] <= out.scores[i]);
    }
  }

  void CheckScoresOf(const Array<Key>& keys) {
    Array<uint64_t> a(keys.size());
    Array<uint64_t> b(keys.size());
    cpu_->Scores(keys.data(), static_cast<int64_t>(keys.size()), a.data(), Pool());
    device_->Scores({keys.data(), static_cast<int64_t>(keys.size()), false}, b.data(), nullptr);
    Finish();
    CHECK(a == b);
  }

  static uint64_t Widen(Key key) { return static_cast<uint64_t>(key); }

  struct Chunk {
    explicit Chunk(int64_t dim)
        : keys(kRows),
          freqs(kRows),
          versions(kRows),
          scores(kRows),
          orders(kRows),
          values(kRows * dim),
          slots(kRows * dim) {}
    template <class Buffers>
    Buffers To(int64_t dim) {
      Buffers out;
      out.keys = keys.data();
      out.freqs = freqs.data();
      out.versions = versions.data();
      out.scores = scores.data();
      out.orders = orders.data();
      out.columns = {{0, values.data(), dim}, {1, slots.data(), dim}};
      return out;
    }
    void AddTo(Rows* rows, int64_t n, int64_t dim) const {
      for (int64_t i = 0; i < n; ++i) {
        Row row{scores[i], freqs[i], versions[i], {}};
        row.values.assign(values.begin() + i * dim, values.begin() + (i + 1) * dim);
        row.values.insert(row.values.end(), slots.begin() + i * dim, slots.begin() + (i + 1) * dim);
        CHECK(rows->emplace(Widen(keys[i]), row).second);
      }
    }
    static constexpr int64_t kRows = 512;
    Array<Key> keys;
    Array<uint32_t> freqs;
    Array<uint32_t> versions;
    Array<uint64_t> scores;
    Array<uint64_t> orders;
    Array<float> values;
    Array<float> slots;
  };

  Rows CpuRows() {
    Rows rows;
    Chunk chunk(dim_);
    const auto out = chunk.template To<Exporter::Buffers>(dim_);
    const auto exporter = cpu_->Export();
    for (int64_t n; (n = exporter->Next(Chunk::kRows, out, Serial())) > 0;) chunk.AddTo(&rows, n, dim_);
    return rows;
  }

  Rows DeviceRows() {
    Rows rows;
    Chunk chunk(dim_);
    const auto out = chunk.template To<DeviceExporter::Buffers>(dim_);
    const auto exporter = device_->Export({});
    for (int64_t n; (n = exporter->Next(Chunk::kRows, out, nullptr)) > 0;) chunk.AddTo(&rows, n, dim_);
    return rows;
  }

  const Shape shape_;
  const int64_t dim_;
  const bool misleading_;
  TableOptions cpu_options_;
  DeviceTableOptions device_options_;
  bool restores_ = false;
  uint32_t epoch_ = 0;
  int64_t cpu_evicted_ = 0;  // by the tables before
  int64_t device_evicted_ = 0;
  uint64_t state_ = 0;
  uint64_t now_ = uint64_t{1700000000} * 1000000;
  std::unique_ptr<Table> cpu_;
  std::unique_ptr<DeviceTable> device_;
};

// ---- Alone

class Alone {
 public:
  template <class... Memory>
  explicit Alone(Eviction eviction, int64_t capacity, Memory... memory) {
    DeviceTableOptions options;
    options.name = "alone";
    options.dim = 2;
    options.max_capacity = capacity;
    options.eviction = eviction;
    table = MakeTable(options, false, memory...);
  }
  void Touch(int64_t begin, int64_t end) {
    Array<int64_t> keys;
    for (int64_t key = begin; key < end; ++key) keys.push_back(key);
    Array<float> rows(2 * keys.size());
    table->GatherOrInsert({keys.data(), end - begin, true}, rows.data(), {}, nullptr, nullptr);
    Finish();
  }
  bool Has(int64_t key) {
    const Array<int64_t> keys = {key};
    Array<Flag> has(1);
    table->Contains({keys.data(), 1, true}, Bools(&has), nullptr);
    Finish();
    return has[0].is_set;
  }
  std::unique_ptr<DeviceTable> table;
};

// Rows of several parts may have one rank.
void OfEqualRanksNoMoreGoThanMust() {
  for (const Eviction eviction : kEvictions) {
    Alone alone(eviction, 500);
    Array<int64_t> keys;
    for (int64_t key = 0; key < 500; ++key) keys.push_back(key);
    const Array<float> rows(1000);
    const Array<uint64_t> scores(500, 7);
    const Array<uint64_t> orders(500, 3);
    RanksIn ranks(scores.data(), orders.data());
    ranks.highest_order = 3;
    alone.table->Import({keys.data(), 500, true}, {{0, rows.data(), 2}}, nullptr, nullptr, ranks, nullptr);
    for (int64_t i = 0; i < 10; ++i) {
      alone.Touch(1000 + 7 * i, 1007 + 7 * i);
      CHECK(alone.table->Size() == 500 && alone.table->EvictedCount() == 7 * (i + 1));
      CHECK(alone.Has(1006 + 7 * i));
    }
  }
}

void ATableWithoutABoundKeepsNoRanks() {
  Alone bounded(Eviction::kLru, 1000000);
  Alone unbounded(Eviction::kLru, 0);
  bounded.Touch(0, 2000);
  unbounded.Touch(0, 2000);
  const int64_t rows = unbounded.table->Memory().slack_bytes / 8 + 2000;  // that there is room for
  CHECK(unbounded.table->Memory().column_bytes == rows * 8);
  CHECK(bounded.table->Memory().column_bytes >= rows * (8 + 28));
  Array<uint64_t> score = {1};
  const Array<int64_t> key = {5};
  unbounded.table->Scores({key.data(), 1, true}, score.data(), nullptr);
  Finish();
  CHECK(score[0] == 0 && unbounded.table->EvictedCount() == 0);
  Array<uint64_t> count = {7};
  DeviceEvicted evicted;
  evicted.count = count.data();
  const Array<float> row(2);
  unbounded.table->InsertAndEvict({key.data(), 1, true}, row.data(), nullptr, {}, evicted, nullptr);
  Finish();
  CHECK(count[0] == 0);
}

void OnceThereIsRoomNothingIsAllocated() {
  for (const Eviction eviction : kEvictions) {
    Alone alone(eviction, 500);
    alone.table->Reserve(500, 100, nullptr);
    const DeviceMemoryUse before = alone.table->Memory();
    for (int64_t i = 0; i < 30; ++i) alone.Touch(i * 70, i * 70 + 100);
    const DeviceMemoryUse after = alone.table->Memory();
    CHECK(after.rows == 500 && alone.table->EvictedCount() == 29 * 70 + 100 - 500);
    CHECK(after.index_bytes == before.index_bytes && after.column_bytes == before.column_bytes &&
          after.scratch_bytes == before.scratch_bytes &&
          after.row_bytes + after.slack_bytes == before.row_bytes + before.slack_bytes);
  }
}

#if !defined(KVTABLE_TEST_CUDA)
void WithoutMemoryATableStaysAsItWas() {
  for (size_t memory = 300000; memory < 420000; memory += 1500) {
    std::unique_ptr<Alone> alone;
    try {
      alone = std::make_unique<Alone>(Eviction::kLfu, 700, memory);
      alone->Touch(0, 100);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kResourceExhausted);
      continue;
    }
    int64_t there = 100;
    while (there < 6000) {
      try {
        alone->Touch(there, there + 600);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kResourceExhausted);
        break;
      }
      there += 600;
    }
    CHECK(alone->table->Size() == std::min<int64_t>(there, 700));
    CHECK(alone->Has(there - 1) && !alone->Has(there));
    alone->Touch(there - 50, there);  // small batches go on
    CHECK(alone->table->EvictedCount() == std::max<int64_t>(there - 700, 0));
  }
}
#endif

void WhatATableCannotDoIsAnError() {
  Alone lru(Eviction::kLru, 5);
  Alone unbounded(Eviction::kCustom, 0);
  const int64_t key = 1;
  const uint64_t score = 3;
  float row[2] = {};
  const DeviceKeys keys{&key, 1, true};
  for (DeviceTable* const table : {lru.table.get(), unbounded.table.get()}) {
    CHECK(Throws(ErrorCode::kFailedPrecondition, "custom", [&] { table->SetScores(keys, &score, nullptr); }));
    CHECK(Throws(ErrorCode::kFailedPrecondition, "custom",
                 [&] { table->InsertAndEvict(keys, row, &score, {}, {}, nullptr); }));
    CHECK(Throws(ErrorCode::kFailedPrecondition, "epoch", [&] { table->SetEpoch(1); }));
    CHECK(table->Size() == 0);
  }
  DeviceInsertion insertion;
  insertion.admission = 1.5;
  CHECK(Throws(ErrorCode::kInvalidArgument, "1.5",
               [&] { lru.table->GatherOrInsert(keys, row, insertion, nullptr); }));
  CHECK(Throws(ErrorCode::kInvalidArgument, "max_capacity", [] { Alone(Eviction::kLru, -1); }));
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) {
  using namespace kvtable;
#if defined(KVTABLE_TEST_WARPS)
  int rounds = 2;
#elif defined(KVTABLE_TEST_FEW_ROUNDS)
  int rounds = 12;
#else
  int rounds = 40;
#endif
  if (argc > 1) rounds = std::atoi(argv[1]);
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) << 32 : 0;
  for (const Eviction eviction : kEvictions) {
    Both<int64_t>(KeyType::kInt64, {eviction, 1000, 3, 300, 4000}).Run(++seed << 20, rounds);
    Both<int32_t>(KeyType::kInt32, {eviction, 90, 1, 400, 600}).Run(++seed << 20, rounds);
    Both<uint64_t>(KeyType::kUint64, {eviction, 3000, 4, 40, 40000}).Run(++seed << 20, 2 * rounds);
    Both<int64_t>(KeyType::kInt64, {eviction, 1, 2, 30, 20}).Run(++seed << 20, rounds);
    Both<int64_t>(KeyType::kInt64, {eviction, 2000, 1, 100, 9000}, true).Run(++seed << 20, 2 * rounds);
    Both<int64_t>(KeyType::kInt64, {eviction, 700, 2, 200, 2000}).Run(++seed << 20, rounds, true);
    Both<int32_t>(KeyType::kInt32, {eviction, 60, 1, 20, 300}, true).Run(++seed << 20, 2 * rounds, true);
  }
  OfEqualRanksNoMoreGoThanMust();
  ATableWithoutABoundKeepsNoRanks();
  OnceThereIsRoomNothingIsAllocated();
#if !defined(KVTABLE_TEST_CUDA)
  WithoutMemoryATableStaysAsItWas();
#endif
  WhatATableCannotDoIsAnError();
  return 0;
}
