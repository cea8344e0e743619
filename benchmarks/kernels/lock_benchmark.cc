// What the locks of a table cost lookups and steps from many threads; prints one JSON object.
//
//   lock_benchmark [--rows N] [--dim N] [--rounds N] [--seconds S] [--shards N,...] [--points R+W,...] [--batch N]
//                  [--read-batch N]
//
// A point has R threads that look up and W that train (SGD), each with batches of its own, called one after the other.
// It is measured, in turns, with all of them on one table; with each on a table of its own, which they share no lock
// of, so that what is left of the difference to one thread is the machine's (memory, caches, processors); with the
// lookups alone, and with the steps alone, on one table. What the stages of a step need, and what it costs to move a
// cache line between two processors, is what lock_model.py starts from.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "line_transfer.h"
#include "lookups/distinct_keys.h"
#include "table/shard_groups.h"
#include "table/sharded_table.h"

namespace kvtable {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBatches = 16;   // of a thread, over and over
constexpr size_t kMostTables = 8;  // with more threads apart, some share one

struct Flags {
  int64_t rows = 2'000'000;
  int64_t dim = 16;
  int64_t batch = 65536;       // of a step
  int64_t read_batch = 65536;  // of a lookup
  int rounds = 3;
  double seconds = 0.2;  // of a turn
  std::vector<int> shards = {8};
  std::vector<std::pair<int, int>> points = {{1, 0}, {2, 0}, {1, 1}, {2, 2}};
};

double Seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double Median(std::vector<double> numbers) {
  if (numbers.empty()) return 0;
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

uint64_t KeyOfRow(uint64_t row) { return Mix64(row + 0x1234567); }

std::unique_ptr<Table> MakeTable(const Flags& flags, int shards) {
  TableOptions options;
  options.dim = flags.dim;
  options.shards = shards;
  auto table = Table::Create(options);
  const std::vector<float> rows(static_cast<size_t>(65536 * flags.dim), 0.25f);
  std::vector<uint64_t> keys(65536);
  for (int64_t begin = 0; begin < flags.rows; begin += 65536) {
    const int64_t n = std::min<int64_t>(65536, flags.rows - begin);
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(static_cast<uint64_t>(begin + i));
    table->Upsert(keys.data(), n, rows.data(), {1, 1}, Serial());
  }
  return table;
}

// Calls work(first key of a batch) until told to stop.
class Worker {
 public:
  Worker(const Flags& flags, uint64_t seed, int64_t batch, std::function<void(const uint64_t*)> work)
      : batch_(batch), keys_(static_cast<size_t>(batch * kBatches)), work_(std::move(work)) {
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = KeyOfRow(Mix64(i ^ seed << 40) % static_cast<uint64_t>(flags.rows));
    }
  }

  void Loop(const std::atomic<bool>& go, const std::atomic<bool>& stop) {
    while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
    calls_ = 0;
    times_.clear();
    for (Clock::time_point begin = Clock::now(); !stop.load(std::memory_order_relaxed);) {
      work_(keys_.data() + calls_ % kBatches * batch_);
      ++calls_;
      const Clock::time_point end = Clock::now();
      times_.push_back(std::chrono::duration<double>(end - begin).count());
      begin = end;
    }
  }

  double keys_done() const { return static_cast<double>(calls_ * batch_); }
  const std::vector<double>& times() const { return times_; }

 private:
  const int64_t batch_;
  std::vector<uint64_t> keys_;
  std::function<void(const uint64_t*)> work_;
  int64_t calls_ = 0;
  std::vector<double> times_;  // of calls
};

using Workers = std::vector<std::unique_ptr<Worker>>;

struct Turn {
  double seconds = 0;
  double reads = 0;   // M keys a second, of all threads together
  double writes = 0;  // the same
  double p50 = 0;     // of a lookup, microseconds
  double p99 = 0;
};

Turn Run(const Flags& flags, const Workers& readers, const Workers& writers) {
  std::atomic<bool> go{false};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (const Workers* workers : {&readers, &writers}) {
    for (const auto& worker : *workers) {
      threads.emplace_back([&go, &stop, w = worker.get()] { w->Loop(go, stop); });
    }
  }
  const Clock::time_point begin = Clock::now();
  go.store(true, std::memory_order_release);
  std::this_thread::sleep_for(std::chrono::duration<double>(flags.seconds));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const double took = Seconds(begin);
  Turn turn;
  turn.seconds = took;
  std::vector<double> times;
  for (const auto& reader : readers) {
    turn.reads += 1e-6 * reader->keys_done() / took;
    times.insert(times.end(), reader->times().begin(), reader->times().end());
  }
  for (const auto& writer : writers) turn.writes += 1e-6 * writer->keys_done() / took;
  if (!times.empty()) {
    std::sort(times.begin(), times.end());
    turn.p50 = 1e6 * times[times.size() / 2];
    turn.p99 = 1e6 * times[times.size() * 99 / 100];
  }
  return turn;
}

// What one thread needs for the stages of a step outside of all locks, nanoseconds a key.
double GroupNanoseconds(const Flags& flags, int shards) {
  int bits = 0;
  while ((1 << bits) < shards) ++bits;
  std::vector<uint64_t> keys(static_cast<size_t>(flags.batch));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = KeyOfRow(Mix64(i) % static_cast<uint64_t>(flags.rows));
  std::vector<uint64_t> distinct(keys.size());
  std::vector<double> took;
  int64_t found = 0;
  for (int round = 0; round < 20; ++round) {
    const Clock::time_point begin = Clock::now();
    ShardGroups<uint64_t> groups(keys.data(), nullptr, flags.batch, bits, 1);
    groups.Count(0);
    groups.Place();
    groups.Sort(0);
    for (int64_t g = 0; g < groups.size(); ++g) {
      found += NumberDistinctKeys(groups[g].keys, static_cast<uint32_t>(groups[g].count), distinct.data(),
                                  [](uint32_t, uint32_t, bool) {});
    }
    took.push_back(1e9 * Seconds(begin) / static_cast<double>(flags.batch));
  }
  return found > 0 ? Median(took) : 0;
}

// A write of a line that is this processor's own.
double OwnLineNanoseconds() {
  constexpr int64_t kTurns = 1'000'000;
  std::atomic<int64_t> count{0};
  const Clock::time_point begin = Clock::now();
  for (int64_t turn = 0; turn < kTurns; ++turn) count.fetch_add(1, std::memory_order_acq_rel);
  return 1e9 * Seconds(begin) / static_cast<double>(kTurns);
}

void Measure(const Flags& flags, int shards, const char** comma) {
  size_t most = 1;
  for (const auto& [reading, writing] : flags.points)
    most = std::max(most, size_t(reading) + size_t(writing));
  std::vector<std::unique_ptr<Table>> tables;  // the first is the one that is shared
  for (size_t t = 0; t < std::min(most, kMostTables); ++t) tables.push_back(MakeTable(flags, shards));
  const double grouping = GroupNanoseconds(flags, shards);
  const Update sgd = MakeUpdate("sgd", {{"learning_rate", 0.01}});
  const std::vector<float> gradients(static_cast<size_t>(flags.batch * flags.dim), 0.25f);
  for (const auto& [reading, writing] : flags.points) {
    struct Side {
      Workers readers, writers;
    };
    Side together, apart;
    std::vector<std::vector<float>> out;
    for (int r = 0; r < reading; ++r) {
      out.emplace_back(static_cast<size_t>(flags.read_batch * flags.dim));
      for (Side* side : {&together, &apart}) {
        Table* const table = tables[side == &apart ? size_t(r) % tables.size() : 0].get();
        side->readers.push_back(std::make_unique<Worker>(
            flags, r + 1, flags.read_batch, [&flags, table, to = out.back().data()](const uint64_t* keys) {
              table->Gather(keys, flags.read_batch, to, Missing::kZeros, nullptr, 0, nullptr, Serial());
            }));
      }
    }
    for (int w = 0; w < writing; ++w) {
      for (Side* side : {&together, &apart}) {
        Table* const table = tables[side == &apart ? size_t(reading + w) % tables.size() : 0].get();
        side->writers.push_back(
            std::make_unique<Worker>(flags, 1000 + w, flags.batch, [&, table](const uint64_t* keys) {
              table->Apply(keys, nullptr, flags.batch, gradients.data(), sgd, {}, {1, 1}, Serial());
            }));
      }
    }
    std::vector<double> reads_alone, writes_alone, reads_apart, writes_apart, reads, writes, waits, p50, p99,
        p99_apart, to_alone, to_apart;
    for (int round = 0; round < flags.rounds; ++round) {
      const auto waited = [&] { return static_cast<const ShardedTable*>(tables[0].get())->LockWaits(); };
      const int64_t before = waited();
      const Turn s = Run(flags, together.readers, together.writers);
      waits.push_back(static_cast<double>(waited() - before) / s.seconds);
      const Turn o = Run(flags, apart.readers, apart.writers);
      reads_alone.push_back(reading == 0 ? 0 : Run(flags, together.readers, {}).reads);
      writes_alone.push_back(writing == 0 ? 0 : Run(flags, {}, together.writers).writes);
      reads.push_back(s.reads);
      writes.push_back(s.writes);
      reads_apart.push_back(o.reads);
      writes_apart.push_back(o.writes);
      to_alone.push_back(s.reads / std::max(reads_alone.back(), 1e-9));
      to_apart.push_back(s.reads / std::max(o.reads, 1e-9));
      p50.push_back(s.p50);
      p99.push_back(s.p99);
      p99_apart.push_back(o.p99);
    }
    std::printf(
        "%s\n  {\"shards\": %d, \"readers\": %d, \"writers\": %d, \"reads\": %.4g, \"writes\": %.4g, "
        "\"reads_apart\": %.4g, \"writes_apart\": %.4g, \"reads_alone\": %.4g, \"writes_alone\": %.4g, "
        "\"reads_to_alone\": %.4g, \"reads_to_apart\": %.4g, \"waits_per_s\": %.4g, \"p50_us\": %.4g, "
        "\"p99_us\": %.4g, \"p99_apart_us\": %.4g, \"group_ns\": %.4g}",
        *comma, shards, reading, writing, Median(reads), Median(writes), Median(reads_apart),
        Median(writes_apart), Median(reads_alone), Median(writes_alone), Median(to_alone), Median(to_apart),
        Median(waits), Median(p50), Median(p99), Median(p99_apart), grouping);
    std::fflush(stdout);
    *comma = ",";
  }
}

int Main(int argc, char** argv) {
  Flags flags;
  const auto each = [](const char* list, const std::function<void(const char*)>& take) {
    for (const char* at = list; at != nullptr && *at != 0;) {
      take(at);
      at = std::strchr(at, ',');
      if (at != nullptr) ++at;
    }
  };
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* const value = argv[i + 1];
    if (name == "--rows") flags.rows = std::atoll(value);
    if (name == "--dim") flags.dim = std::atoll(value);
    if (name == "--batch") flags.batch = std::atoll(value);
    if (name == "--read-batch") flags.read_batch = std::atoll(value);
    if (name == "--rounds") flags.rounds = std::atoi(value);
    if (name == "--seconds") flags.seconds = std::atof(value);
    if (name == "--shards") {
      flags.shards.clear();
      each(value, [&](const char* at) { flags.shards.push_back(std::atoi(at)); });
    }
    if (name == "--points") {
      flags.points.clear();
      each(value, [&](const char* at) {
        const char* const plus = std::strchr(at, '+');
        flags.points.emplace_back(std::atoi(at), plus == nullptr ? 0 : std::atoi(plus + 1));
      });
    }
  }
  std::printf("{\"line_transfer_ns\": %.4g, \"own_line_ns\": %.4g,\n", LineTransferNanoseconds(),
              OwnLineNanoseconds());
  std::printf(" \"batch\": %lld, \"read_batch\": %lld, \"dim\": %lld, \"points\": [",
              static_cast<long long>(flags.batch), static_cast<long long>(flags.read_batch),
              static_cast<long long>(flags.dim));
  const char* comma = "";
  for (const int shards : flags.shards) Measure(flags, shards, &comma);
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) { return kvtable::Main(argc, argv); }
