// How fast a table in device memory is, beside what the device's memory allows; prints one JSON object.
//
//   device_table_benchmark [--rows N] [--batch N] [--dims 8,32,64] [--loads 0.5,0.75,1]
//
// The method is the one HierarchicalKV's benchmark uses, so that numbers can be held against its table:
// 64-bit keys and float32 rows; the table is filled with consecutive keys to a part ("load") of the rows it
// has room for; a timed batch has 60% keys of the batch inserted last and 40% that are not there, all
// different, in no order; nine warm-ups; the time is one call and a wait for its stream, the better of two. Names are
// those of its operations; a star means that the call gives pointers to rows in place of values; assign leaves out
// keys that are not there. Beside it:
// batches of new keys only, of hits all over the table, and of keys after Zipf's law, where some occur very
// often.
//
// insert_and_evict has bounded tables of its own, full to their capacity (load 1, whatever the loads are):
// for each of three policies, batches of new keys only and of 40% new keys, the others of one batch
// before. Each new key evicts a row, which is handed out: key, value and score.
//
// "bytes" is the least that an operation must move: keys, one 64-byte bucket for each that is different, rows
// read and written, for evicted ones, too. "roofline" is how much of the measured bandwidth of a copy within
// the device's memory that comes to.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "benchmark_device.h"
#include "benchmark_ids.h"
#include "kvtable/device_table.h"

namespace kvtable {
namespace {

constexpr int kWarmUps = 9;
constexpr int kTimed = 2;
constexpr Stamp kOld{1, 1};
constexpr Stamp kNew{1, 2};  // of rows that are to be found by their stamp

using Keys = std::vector<uint64_t>;

class Benchmark {
 public:
  Benchmark(int64_t dim, int64_t rows, int64_t batch, double bandwidth)
      : dim_(dim),
        rows_(rows),
        batch_(std::min(batch, rows / 2)),
        bandwidth_(bandwidth),
        keys_(batch),
        values_(std::max<int64_t>(batch * dim, 2 * batch)),
        found_(batch) {
    NewTable({});
  }

  void Run(double load) {
    load_ = load;
    Fill(static_cast<int64_t>(load * static_cast<double>(rows_)));
    Lookups();
    WritesToRowsThatAreThere();
    Inserts();
    WholeTable();
    Removals();
    Memory();
  }

  // In place of the table that there was.
  void RunBounded(Eviction eviction, const std::string& policy) {
    DeviceTableOptions options;
    options.max_capacity = rows_;
    options.eviction = eviction;
    NewTable(options);
    load_ = 1;
    Fill(rows_);
    const int64_t before = table_->EvictedCount();
    InsertAndEvict("insert_and_evict, " + policy + ", all new", eviction, 0);
    InsertAndEvict("insert_and_evict, " + policy + ", 40% new", eviction, Hits());
    const int64_t evicted = table_->EvictedCount() - before;
    const int64_t expected = (kWarmUps + kTimed) * (2 * batch_ - static_cast<int64_t>(Hits()));
    if (evicted != expected || table_->Size() != rows_) {
      throw Error(ErrorCode::kFailedPrecondition,
                  "insert_and_evict, " + policy + ": " + std::to_string(evicted) + " rows went; expected " +
                      std::to_string(expected) + ". What was timed is something else.");
    }
  }

 private:
  // What an operation must move for a batch, beside the row bytes that it reads or writes.
  struct Traffic {
    double rows_read = 0;  // of the table or of the batch, as parts of the batch
    double rows_written = 0;
    double new_keys = 0;    // whose buckets are written, too
    double more_bytes = 0;  // of each key
    double evicted = 0;     // rows handed out, as a part of the batch
  };

  enum class After { kNothing, kRemoveTheBatch, kRefill };

  void Lookups() {
    const auto mixed = [&](uint64_t run) { return MixedKeys(run); };
    const auto hits = [&](uint64_t run) { return UniformIds(Size(), Filled(), run); };
    const auto zipf = [&](uint64_t run) { return ZipfIds(Size(), Filled(), run); };
    const auto find = [&] {
      table_->Gather(Batch(false), values_.data(), Missing::kZeros, nullptr, 0, found_.data(), nullptr);
    };
    Report("find", mixed, {0.6, 1, 0, 1}, find);
    Report("find*", mixed, {0, 0, 0, 8}, [&] { table_->Pointers(Batch(false), Pointers(), nullptr); });
    Report("find, hits all over", hits, {1, 1, 0, 1}, find);
    Report("find, Zipf", zipf, {1, 1, 0, 1}, find);
    Report("contains", mixed, {0, 0, 0, 1}, [&] { table_->Contains(Batch(false), found_.data(), nullptr); });
  }

  void WritesToRowsThatAreThere() {
    const auto mixed = [&](uint64_t run) { return MixedKeys(run); };
    const auto last = [&](uint64_t run) { return LastKeys(run); };
    const auto zipf = [&](uint64_t run) { return ZipfIds(Size(), Filled(), run); };
    Report("assign", mixed, {0.6, 0.6, 0, 8}, [&] { Upsert(true, true); });
    Report("insert_or_assign, all there", last, {1, 1, 0, 8}, [&] { Upsert(true); });
    Report("assign, Zipf", zipf, {1, 1, 0, 8}, [&] { Upsert(false); });
    Report("accum, Zipf", zipf, {2, 1, 0, 8},
           [&] { table_->Accumulate(Batch(false), values_.data(), true, kOld, nullptr); });
    Report("find_or_insert, Zipf", zipf, {1, 1, 0, 8},
           [&] { table_->GatherOrInsert(Batch(false), values_.data(), kOld, nullptr, nullptr); });
  }

  void Inserts() {
    const auto mixed = [&](uint64_t run) { return MixedKeys(run); };
    const auto fresh = [&](uint64_t run) { return NewKeys(run); };
    const auto after = After::kRemoveTheBatch;
    Report("insert_or_assign", mixed, {1, 1, 0.4, 8}, [&] { Upsert(true); }, after);
    Report("insert_or_assign, may repeat", mixed, {1, 1, 0.4, 8}, [&] { Upsert(false); }, after);
    Report("insert_or_assign, all new", fresh, {1, 1, 1, 8}, [&] { Upsert(true); }, after);
    Report(
        "accum_or_assign", mixed, {1.6, 1, 0.4, 8},
        [&] { table_->Accumulate(Batch(false), values_.data(), true, kOld, nullptr); }, after);
    Report(
        "find_or_insert", mixed, {0.6, 1.4, 0.4, 8},
        [&] { table_->GatherOrInsert(Batch(true), values_.data(), kOld, nullptr, nullptr); }, after);
    Report(
        "find_or_insert*", mixed, {0, 0.4, 0.4, 16},
        [&] { table_->PointersOrInsert(Batch(true), Pointers(), kOld, nullptr, nullptr); }, after);
  }

  // `hits` keys of a batch are of the last one before all of these. Custom scores rise from batch to batch.
  void InsertAndEvict(const std::string& operation, Eviction eviction, size_t hits) {
    const bool custom = eviction == Eviction::kCustom;
    DeviceArray<uint64_t> scores(custom ? batch_ : 1);
    const DeviceArray<uint64_t> evicted_keys(batch_);
    const DeviceArray<float> evicted_values(batch_ * dim_);
    const DeviceArray<uint64_t> evicted_scores(batch_);
    const DeviceArray<uint64_t> count(1);
    const DeviceEvicted evicted{evicted_keys.data(), evicted_values.data(), evicted_scores.data(), batch_,
                                count.data()};
    const auto give_scores = [&](uint64_t run) {
      Keys given(Size());
      for (size_t i = 0; i < given.size(); ++i) given[i] = run << 32 | Mix64(run << 40 | i) >> 32;
      scores.Set(given);
    };
    const Keys last = NewKeys(runs_);
    const auto make = [&](uint64_t run) {
      Keys keys = NewKeys(run);
      std::copy(last.end() - static_cast<ptrdiff_t>(hits), last.end(), keys.begin());
      Shuffle(&keys, run);
      return keys;
    };
    const double fresh = 1 - static_cast<double>(hits) / static_cast<double>(batch_);
    // A stamp and a score are written for each key; custom ones are read before.
    const auto queue = [&] {
      table_->InsertAndEvict(Batch(true), values_.data(), custom ? scores.data() : nullptr, kOld, evicted,
                             nullptr);
    };
    Report(operation.c_str(), make, {1, 1, fresh, custom ? 24.0 : 16.0, fresh}, queue, After::kNothing,
           custom ? give_scores : std::function<void(uint64_t)>());
  }

  // Speeds are in rows of the table.
  void WholeTable() {
    const RowPredicate is_new{RowPredicate::Test::kVersionAtLeast, kNew.version};
    const double row = RowBytes();
    ReportWhole("size", 0, 0, [&] { table_->Size(); });
    ReportWhole("export_batch", 64.0 / 5 + 8 + 8 + 2 * row, 0, [&] { Export({}); });
    // A batch of rows are what is wanted.
    const double share = static_cast<double>(batch_) / static_cast<double>(filled_ + batch_);
    ReportWhole("export_batch_if", 64.0 / 5 + 8 + share * (8 + 2 * row), batch_, [&] { Export(is_new); });
    ReportWhole("erase_if", 64.0 / 5 + 8, batch_, [&] { table_->RemoveIf(is_new, nullptr); });
  }

  void Removals() {
    Report(
        "erase", [&](uint64_t run) { return MixedKeys(run); }, {0, 0, 0.6, 0},
        [&] { table_->Remove(Batch(false), nullptr); }, After::kRefill);
  }

  void Memory() const {
    const DeviceMemoryUse use = table_->Memory();
    std::printf(
        ",\n  {\"dim\": %lld, \"load\": %.2f, \"operation\": \"memory\", \"rows\": %lld, "
        "\"overhead_bytes_per_row\": %.2f}",
        static_cast<long long>(dim_), load_, static_cast<long long>(use.rows),
        static_cast<double>(use.index_bytes + use.column_bytes) / static_cast<double>(use.rows));
  }

  DeviceKeys Batch(bool distinct) const { return {keys_.data(), batch_, distinct}; }
  void** Pointers() const { return reinterpret_cast<void**>(values_.data()); }
  size_t Size() const { return static_cast<size_t>(batch_); }
  size_t Hits() const { return Size() * 6 / 10; }  // of a batch of both
  uint64_t Filled() const { return static_cast<uint64_t>(filled_); }
  double RowBytes() const { return static_cast<double>(dim_) * sizeof(float); }

  void NewTable(DeviceTableOptions options) {
    table_.reset();
    filled_ = 0;
    options.name = "benchmark";
    options.key_type = KeyType::kUint64;
    options.dim = dim_;
    table_ = MakeTable(options);
    table_->Reserve(rows_, 2 * batch_, nullptr);
  }

  void Upsert(bool distinct, bool existing_only = false) {
    Stamp stamp = kOld;
    stamp.existing_only = existing_only;
    table_->Upsert(Batch(distinct), values_.data(), stamp, nullptr);
  }

  void Export(const RowPredicate& predicate) {
    const auto exporter = table_->Export(predicate);
    DeviceExporter::Buffers out;
    out.keys = keys_.data();
    out.columns = {{0, values_.data(), dim_}};
    while (exporter->Next(batch_, out, nullptr) > 0) {
    }
  }

  void Fill(int64_t rows) {
    Keys keys(Size());
    while (filled_ < rows) {
      const int64_t n = std::min(batch_, rows - filled_);
      for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = static_cast<uint64_t>(filled_ + i);
      keys_.Set(keys);
      table_->Upsert({keys_.data(), n, true}, values_.data(), kOld, nullptr);
      WaitForDevice();
      filled_ += n;
    }
  }

  // Puts the keys back that a removal took along.
  void Refill() {
    const int64_t rows = filled_;
    filled_ = std::max(int64_t{0}, filled_ - batch_);
    Fill(rows);
  }

  Keys NewKeys(uint64_t run) const {
    Keys keys(Size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = (uint64_t{1} << 40) + run * keys.size() + i;
    return keys;
  }
  Keys LastKeys(uint64_t run) const {
    Keys keys(Size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = Filled() - keys.size() + i;
    Shuffle(&keys, run);
    return keys;
  }
  Keys MixedKeys(uint64_t run) const {
    Keys keys = NewKeys(run);
    for (size_t i = 0; i < Hits(); ++i) keys[i] = Filled() - keys.size() + i;
    Shuffle(&keys, run);
    return keys;
  }
  static void Shuffle(Keys* keys, uint64_t run) {
    for (size_t i = keys->size() - 1; i > 0; --i)
      std::swap((*keys)[i], (*keys)[Mix64(run << 40 | i) % (i + 1)]);
  }

  // `queue` works on the batch that `make` made for this run. Batches are made before, all at once: the device
  // is not to wait for them.
  void Report(const char* operation, const std::function<Keys(uint64_t)>& make, const Traffic& traffic,
              const std::function<void()>& queue, After after = After::kNothing,
              const std::function<void(uint64_t)>& prepare = nullptr) {
    double best = 1e9;
    int64_t distinct = 0;
    std::vector<Keys> batches(kWarmUps + kTimed);
    std::vector<std::thread> makers;
    for (size_t run = 0; run < batches.size(); ++run) {
      makers.emplace_back([&, run] { batches[run] = make(runs_ + 1 + run); });
    }
    for (std::thread& maker : makers) maker.join();
    for (int run = 0; run < kWarmUps + kTimed; ++run) {
      const Keys& keys = batches[static_cast<size_t>(run)];
      ++runs_;
      if (prepare) prepare(runs_);
      keys_.Set(keys);
      const double seconds = Seconds(queue);
      if (run >= kWarmUps) best = std::min(best, seconds);
      if (run == kWarmUps) distinct = CountDistinct(keys);
      if (after == After::kRemoveTheBatch) table_->Remove(Batch(false), nullptr);
      if (after != After::kNothing) Refill();
    }
    // Of keys that repeat, bucket and row of the table are moved once; what the caller gives or gets, each
    // time.
    const double n = static_cast<double>(batch_);
    const double rows = static_cast<double>(distinct) * traffic.rows_read + n * traffic.rows_written;
    const double buckets = static_cast<double>(distinct) * (1 + traffic.new_keys);
    // An evicted row: its bucket and itself are read and written; its score is read; key and score are handed
    // out.
    const double gone = n * traffic.evicted * (2 * 64 + 2 * RowBytes() + 8 + 16);
    Print(operation, batch_, best, n * (8 + traffic.more_bytes) + 64 * buckets + RowBytes() * rows + gone);
  }

  // `more` rows with a new stamp are inserted before.
  void ReportWhole(const char* operation, double bytes_per_row, int64_t more,
                   const std::function<void()>& queue) {
    const RowPredicate is_new{RowPredicate::Test::kVersionAtLeast, kNew.version};
    double best = 1e9;
    for (int run = 0; run < 1 + kTimed; ++run) {
      if (more > 0) {
        keys_.Set(NewKeys(++runs_));
        table_->Upsert(Batch(true), values_.data(), kNew, nullptr);
      }
      const double seconds = Seconds(queue);
      if (run >= 1) best = std::min(best, seconds);
      if (more > 0) table_->RemoveIf(is_new, nullptr);
    }
    Print(operation, filled_ + more, best, bytes_per_row * static_cast<double>(filled_ + more));
  }

  void Print(const char* operation, int64_t keys, double seconds, double bytes) const {
    const double time = std::max(seconds, 1e-9);
    const double rate = static_cast<double>(keys) / time;
    std::printf(
        "%s\n  {\"dim\": %lld, \"rows\": %lld, \"load\": %.2f, \"operation\": \"%s\", \"keys\": %lld, "
        "\"seconds\": %.4g, \"keys_per_second\": %.4g, \"hkv_unit\": %.4g, \"bytes\": %.4g, "
        "\"roofline\": %.4g}",
        std::exchange(first_, false) ? "" : ",", static_cast<long long>(dim_), static_cast<long long>(rows_),
        load_, operation, static_cast<long long>(keys), time, rate, rate / (1024.0 * 1024.0 * 1024.0), bytes,
        bytes / time / bandwidth_);
    std::fflush(stdout);
  }

  int64_t dim_;
  int64_t rows_;
  int64_t batch_;
  double bandwidth_;
  DeviceArray<uint64_t> keys_;
  DeviceArray<float> values_;
  DeviceArray<bool> found_;
  std::unique_ptr<DeviceTable> table_;
  double load_ = 0;
  int64_t filled_ = 0;
  uint64_t runs_ = 0;
  inline static bool first_ = true;  // of what is printed
};

std::vector<double> Numbers(const char* at) {
  std::vector<double> numbers;
  while (*at != '\0') {
    char* end = nullptr;
    numbers.push_back(std::strtod(at, &end));
    if (end == at || numbers.back() <= 0) return {};
    at = *end == ',' ? end + 1 : end;
  }
  return numbers;
}

int Main(int argc, char** argv) {
  double rows = 64e6;
  double batch = 1 << 20;
  std::vector<double> dims = {8, 32, 64};
  std::vector<double> loads = {0.5, 0.75, 1.0};
  for (int i = 1; i < argc; i += 2) {
    const std::vector<double> given = i + 1 < argc ? Numbers(argv[i + 1]) : std::vector<double>();
    const std::string name = argv[i];
    if (given.empty()) {
      std::fprintf(stderr, "device_table_benchmark: %s needs a number greater than 0\n", argv[i]);
      return 2;
    }
    if (name == "--rows") {
      rows = given[0];
    } else if (name == "--batch") {
      batch = given[0];
    } else if (name == "--dims") {
      dims = given;
    } else if (name == "--loads") {
      loads = given;
    } else {
      std::fprintf(stderr, "device_table_benchmark: %s; expected --rows, --batch, --dims or --loads\n",
                   argv[i]);
      return 2;
    }
  }
  const double bandwidth = CopyBandwidth();
  std::printf("{\"device\": \"%s\", \"copy_bytes_per_second\": %.4g, \"batch\": %lld, \"results\": [",
              DeviceName().c_str(), bandwidth, static_cast<long long>(batch));
  for (const double dim : dims) {
    Benchmark benchmark(static_cast<int64_t>(dim), static_cast<int64_t>(rows), static_cast<int64_t>(batch),
                        bandwidth);
    for (const double load : loads) benchmark.Run(load);
    benchmark.RunBounded(Eviction::kLru, "LRU");
    benchmark.RunBounded(Eviction::kLfu, "LFU");
    benchmark.RunBounded(Eviction::kCustom, "custom");
  }
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) {
  try {
    return kvtable::Main(argc, argv);
  } catch (const kvtable::Error& error) {
    std::fprintf(stderr, "device_table_benchmark: %s\n", error.what());
    return 1;
  }
}
