// Many threads mix every operation on one table, and nobody ever sees a torn row. Meant for the sanitizers,
// too.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "spilled.h"
#include "table/read_seats.h"
#include "table/rw_spinlock.h"
#include "table/shard_lock.h"
#include "table/sharded_table.h"

namespace kvtable {
namespace {

constexpr int64_t kDim = 24;
constexpr int64_t kKeys = 5000;
constexpr int64_t kBatch = 700;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next(uint64_t below) { return Mix64(++state_) % below; }

 private:
  uint64_t state_;
};

bool IsWhole(const float* row, int64_t width) {
  for (int64_t j = 1; j < width; ++j) {
    if (row[j] != row[0]) return false;
  }
  return true;
}

void FillBatch(Random* random, std::vector<int64_t>* keys, std::vector<float>* rows) {
  for (int64_t i = 0; i < kBatch; ++i) {
    (*keys)[i] = static_cast<int64_t>(random->Next(kKeys)) - kKeys / 2;
    const float number = static_cast<float>(random->Next(1000));
    for (int64_t j = 0; j < kDim; ++j) (*rows)[i * kDim + j] = number;
  }
}

const SlotSpec kCopy = {"copy", kDim, SlotSpec::Init::kCopyValue, 0.0};
const SlotSpec kConstant = {"constant", 3, SlotSpec::Init::kConstant, 7.0};

void MixOperations(Table* table, ParallelFor* pool, uint64_t seed, int rounds) {
  Random random(seed);
  std::vector<int64_t> keys(kBatch);
  std::vector<float> rows(kBatch * kDim);
  std::vector<float> out(kBatch * kDim);
  std::vector<float> extra(kBatch * 3);
  std::vector<uint32_t> freqs(kBatch);
  std::vector<uint32_t> versions(kBatch);
  std::vector<uint64_t> positions(kBatch);
  auto flags = std::make_unique<bool[]>(kBatch);
  for (int round = 0; round < rounds; ++round) {
    FillBatch(&random, &keys, &rows);
    bool check = false;
    switch (random.Next(16)) {
      case 0:
      case 1:
        table->Gather(keys.data(), kBatch, out.data(), Missing::kInitial, nullptr, 0, flags.get(), *pool);
        check = true;
        break;
      case 2:
      case 3:
        table->GatherOrInsert(keys.data(), kBatch, out.data(), {1, 5}, flags.get(), *pool);
        check = true;
        break;
      case 4:
      case 5:
        table->Upsert(keys.data(), kBatch, rows.data(), {1, 6}, *pool);
        break;
      case 6:
        table->Accumulate(keys.data(), kBatch, rows.data(), random.Next(2) == 0, {1, 7}, *pool);
        break;
      case 7:
        table->Remove(keys.data(), kBatch / 4, *pool);
        break;
      case 8:
        table->Contains(keys.data(), kBatch, flags.get(), *pool);
        break;
      case 9:
        table->GatherStamps(keys.data(), kBatch, freqs.data(), versions.data(), *pool);
        break;
      case 10: {
        const auto exporter = table->Export();
        Exporter::Buffers buffers;
        buffers.keys = keys.data();
        buffers.columns = {{0, out.data(), kDim}};
        for (int64_t n; (n = exporter->Next(kBatch, buffers, *pool)) > 0;) {
          for (int64_t i = 0; i < n; ++i) CHECK(IsWhole(&out[i * kDim], kDim));
        }
        break;
      }
      case 11:
        if (random.Next(4) == 0) table->Clear();
        CHECK(table->Memory().rows >= 0);
        CHECK(table->Size() >= 0);
        break;
      case 12:
        if (random.Next(2) == 0) {
          table->EnsureSlots({kCopy, kConstant}, *pool);
        } else {
          table->EnsureSlots({kConstant}, *pool);
        }
        break;
      case 13: {
        const int column = 1;
        try {
          table->GatherColumns(keys.data(), kBatch, {{0, out.data(), kDim}, {column, extra.data(), 3}},
                               flags.get(), *pool);
          check = true;
          for (int64_t i = 0; i < kBatch; ++i) CHECK(IsWhole(&extra[i * 3], 3) && extra[i * 3] == 7.0f);
        } catch (const Error& error) {  // column 1 is another one, or not there
          CHECK(error.code() == ErrorCode::kFailedPrecondition);
        }
        break;
      }
      case 14:
      case 15: {  // where the rows might be, mostly wrong
        for (uint64_t& position : positions) position = random.Next(8) << 32 | random.Next(kKeys);
        const Update update = MakeUpdate("sgd", {{"learning_rate", 0.5}});
        table->Apply(keys.data(), positions.data(), kBatch, rows.data(), update, {}, {1, 8}, *pool);
        const auto [slots, generation] = table->schema();
        if (slots.size() == 2) {  // the first is kCopy
          const Update momentum = MakeUpdate("momentum", {{"learning_rate", 0.5}, {"momentum", 0.5}});
          try {
            table->Apply(keys.data(), positions.data(), kBatch, rows.data(), momentum, {{1}, generation},
                         {1, 8}, *pool);
          } catch (const Error& error) {  // dropped meanwhile
            CHECK(error.code() == ErrorCode::kFailedPrecondition);
          }
        }
        table->Zeroed(keys.data(), kBatch, flags.get(), *pool);
        CHECK(table->ZeroedRows() == 0);
        break;
      }
    }
    if (check) {
      for (int64_t i = 0; i < kBatch; ++i) CHECK(IsWhole(&out[i * kDim], kDim));
    }
  }
}

void EveryOperationAtOnceLeavesRowsWhole(bool spilled) {
  TableOptions options;
  options.dim = kDim;
  options.initializer.a = 0.5;
  options.shards = 8;
  if (spilled) options = Spilled(options, 2 * kDim * 4 + 3 * 4);
  const auto table = Table::Create(options);
  const auto pool = MakeThreadPool(3);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      MixOperations(table.get(), t % 2 == 0 ? pool.get() : &Serial(), t << 32, spilled ? 200 : 400);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void AccumulateLosesNothing() {
  TableOptions options;
  options.dim = 1;
  const auto table = Table::Create(options);
  const auto pool = MakeThreadPool(2);
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 3000; ++i) keys.push_back(i % 100);
  const std::vector<float> ones(keys.size(), 1.0f);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        table->Accumulate(keys.data(), static_cast<int64_t>(keys.size()), ones.data(), true, {1, 1}, *pool);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<float> out(keys.size());
  std::vector<uint32_t> freqs(keys.size());
  table->Gather(keys.data(), 100, out.data(), Missing::kZeros, nullptr, 0, nullptr, *pool);
  table->GatherStamps(keys.data(), 100, freqs.data(), nullptr, *pool);
  for (int i = 0; i < 100; ++i) {
    CHECK(out[i] == 30.0f * kThreads * kRounds);
    CHECK(freqs[i] == 30u * kThreads * kRounds);
  }
}

void EveryNewKeyIsInsertedByExactlyOneThread(bool spilled) {
  TableOptions options;
  options.dim = 2;
  if (spilled) options = Spilled(options, 8);
  const auto table = Table::Create(options);
  constexpr int64_t kCount = 20000;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < kCount; ++i) keys.push_back(i * 1000003);
  std::atomic<int64_t> inserted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<float> out(kCount * 2);
      auto flags = std::make_unique<bool[]>(kCount);
      table->GatherOrInsert(keys.data(), kCount, out.data(), {1, 0}, flags.get(), Serial());
      for (int64_t i = 0; i < kCount; ++i) inserted += flags[i] ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(inserted == kCount);
  CHECK(table->Size() == kCount);
}

void PoolRunsFromManyThreadsAndRethrows() {
  const auto pool = MakeThreadPool(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<int> ran{0};
        pool->Run(7, [&](int64_t) { ++ran; });
        CHECK(ran == 7);
        bool thrown = false;
        ran = 0;
        try {
          pool->Run(5, [&](int64_t i) {
            ++ran;
            if (i == 2) throw Error(ErrorCode::kInvalidArgument, "two");
          });
        } catch (const Error&) {
          thrown = true;
        }
        CHECK(thrown && ran == 5);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void SpinlockExcludes() {
  RwSpinlock lock;
  int64_t a = 0;
  int64_t b = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 5000; ++round) {
        if (t < 2) {
          lock.lock();
          ++a;
          ++b;
          lock.unlock();
        } else {
          lock.lock_shared();
          CHECK(a == b);
          lock.unlock_shared();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(a == 10000);
}

// When a writer lets go, those who waited to read have their turn before the next writer.
void ReadersWhoWaitAreNext() {
  RwSpinlock lock;
  std::atomic<bool> done{false};
  lock.lock();
  std::thread reader([&] {
    lock.lock_shared();
    while (!done) std::this_thread::yield();
    lock.unlock_shared();
  });
  while (!lock.readers_wait()) std::this_thread::yield();
  lock.unlock();
  CHECK(!lock.try_lock());  // its turn, or it has the lock
  done = true;
  reader.join();
  CHECK(!lock.readers_wait() && !lock.is_wanted() && lock.try_lock());
}

// A writer stands still with one shard in hand, a lookup of all shards waits for it, and another writer does, too:
// whoever wants other shards goes on.
void ASlowWriterHoldsUpNobodyElse() {
  constexpr int kShardBits = 3;
  constexpr uint64_t kSlow = 5;
  constexpr int64_t kCount = 6000;  // some blocks of a lookup
  TableOptions options;
  options.dim = 2;
  options.shards = 1 << kShardBits;
  ShardedTable table(options);
  std::vector<int64_t> all, slow, others;
  for (int64_t key = 0; key < kCount; ++key) {
    all.push_back(key);
    const bool is_slow = ShardOf(Mix64(static_cast<uint64_t>(key)), kShardBits) == int{kSlow};
    (is_slow ? slow : others).push_back(key);
  }
  const int64_t num_slow = static_cast<int64_t>(slow.size());
  const int64_t num_others = static_cast<int64_t>(others.size());
  const std::vector<float> ones(kCount * 2, 1.0f);
  const std::vector<float> twos(kCount * 2, 2.0f);
  table.Upsert(all.data(), kCount, ones.data(), {1, 5}, Serial());
  table.Upsert(slow.data(), 1, ones.data(), {1, 1}, Serial());  // goes by its age

  std::atomic<bool> stands{false};
  std::atomic<bool> go_on{false};
  table.OnEvicted([&](uint64_t) {
    stands = true;
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  RowTest old;
  old.written_before = 2;
  std::thread writer([&] {
    PassCursor cursor{kSlow << 32, false};
    CHECK(table.EvictSlice(old, &cursor, num_slow, Serial()) == 1);
  });
  while (!stands) std::this_thread::yield();

  const auto await = [&](int64_t waits) {
    while (table.LockWaits() < waits) std::this_thread::yield();
  };
  int64_t waits = table.LockWaits();
  std::atomic<bool> looked_up{false};
  std::vector<float> read(kCount * 2);
  std::thread reader([&] {
    table.Gather(all.data(), kCount, read.data(), Missing::kZeros, nullptr, 0, nullptr, Serial());
    looked_up = true;
  });
  await(++waits);
  std::vector<float> out(kCount * 2);
  const auto others_hold = [&](float value) {
    table.Gather(others.data(), num_others, out.data(), Missing::kZeros, nullptr, 0, nullptr, Serial());
    for (int64_t i = 0; i < 2 * num_others; ++i) CHECK(out[static_cast<size_t>(i)] == value);
  };
  others_hold(1.0f);
  table.Upsert(others.data(), num_others, twos.data(), {1, 5}, Serial());
  others_hold(2.0f);

  std::thread second([&] { table.Upsert(all.data(), kCount, ones.data(), {1, 5}, Serial()); });
  await(++waits);  // and has written the other shards before
  others_hold(1.0f);
  const Update sgd = MakeUpdate("sgd", {{"learning_rate", 1.0}});
  table.Apply(others.data(), nullptr, num_others, ones.data(), sgd, {}, {1, 5}, Serial());
  others_hold(0.0f);
  table.GatherOrInsert(others.data(), num_others, out.data(), Insertion{{1, 5}}, Serial());
  CHECK(!looked_up && table.LockWaits() == waits);

  go_on = true;
  writer.join();
  reader.join();
  second.join();
  for (int64_t i = 0; i < kCount; ++i) {
    const float value = read[static_cast<size_t>(2 * i)];
    const bool is_gone = all[static_cast<size_t>(i)] == slow[0];
    CHECK(value == read[static_cast<size_t>(2 * i + 1)] && (value == 1.0f || (is_gone && value == 0.0f)));
  }
  CHECK(table.Size() == kCount);
}

// A lookup that waits for a shard does not wait until a long write of it is done.
void ALongWriteLetsLookupsIn(bool spilled) {
  constexpr int64_t kCount = 20000;
  bool let_in = false;
  for (int attempt = 0; attempt < 100 && !let_in; ++attempt) {  // a thread may get no processor for long
    TableOptions options;
    options.dim = 2;
    options.shards = 1;
    options.expiry.unit = AgeUnit::kSteps;
    options.expiry.max_age = 5;
    if (spilled) options = Spilled(options, 8, attempt % 2 == 0 ? 64 : 2000);
    ShardedTable table(options);
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < kCount; ++key) keys.push_back(key);
    const std::vector<float> ones(kCount * 2, 1.0f);
    const std::vector<float> twos(kCount * 2, 2.0f);
    table.Upsert(keys.data(), 1, ones.data(), {}, Serial());
    table.SetStep(8);  // its age: the write of all begins with a row that is made anew
    table.Upsert(keys.data() + 1, kCount - 1, ones.data(), {}, Serial());
    std::atomic<bool> stands{false};
    std::atomic<bool> go_on{false};
    table.OnEvicted([&](uint64_t) {
      stands = true;
      while (!go_on) std::this_thread::yield();
    });
    std::thread writer([&] { table.Upsert(keys.data(), kCount, twos.data(), {}, Serial()); });
    while (!stands) std::this_thread::yield();
    const int64_t waits = table.LockWaits();
    std::vector<float> last(2);
    std::thread reader(
        [&] { table.Gather(&keys.back(), 1, last.data(), Missing::kZeros, nullptr, 0, nullptr, Serial()); });
    while (table.LockWaits() == waits) std::this_thread::yield();
    go_on = true;
    writer.join();
    reader.join();
    CHECK(last[0] == last[1] && (last[0] == 1.0f || last[0] == 2.0f));
    let_in = last[0] == 1.0f;
    std::vector<float> out(kCount * 2);
    table.Gather(keys.data(), kCount, out.data(), Missing::kZeros, nullptr, 0, nullptr, Serial());
    CHECK(out == twos);
  }
  CHECK(let_in);
}

// More lookups than there are seats to read from go by the shards' own locks.
void LookupsWithoutASeatReadAsWell() {
  ReadSeats seats;
  std::vector<ReadSeats::Seat*> taken;
  uint64_t got = 0;
  for (ReadSeats::Seat* seat; (seat = seats.Take(0b110, &got)) != nullptr;) {
    CHECK(got == 0b110);
    taken.push_back(seat);
  }
  CHECK(got == 0 && taken.size() >= 8);
  for (ReadSeats::Seat* const seat : taken) seats.Leave(seat);
  ShardLock lock(&seats, 0);
  lock.lock();
  CHECK(seats.Take(0b1, &got) == nullptr && got == 0);
  ReadSeats::Seat* const seat = seats.Take(0b111, &got);
  CHECK(seat != nullptr && got == 0b110);
  lock.unlock();
  seats.Leave(seat);
  CHECK(lock.try_lock_shared() && lock.waits() == 0);
  lock.unlock_shared();
}

// Slots come, go and change places under those who found their columns by name: each reads and writes the slot
// it looked up, or is told that it went. A slot that was another's would show the other's number.
void ColumnsFoundByNameAreNeverAnotherSlots() {
  const std::vector<SlotSpec> both = {{"one", 2, SlotSpec::Init::kConstant, 1.0},
                                      {"two", 2, SlotSpec::Init::kConstant, 2.0}};
  TableOptions options;
  options.dim = 2;
  options.shards = 8;
  options.slots = both;
  const auto table = Table::Create(options);
  const auto pool = MakeThreadPool(3);
  constexpr int64_t kCount = 500;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < kCount; ++i) keys.push_back(i * 7);
  const std::vector<float> values(kCount * 2, 0.5f);
  table->Upsert(keys.data(), kCount, values.data(), {}, *pool);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> rows(kCount * 2);
      for (int round = 0; !stop; ++round) {
        const RowSchema schema = table->schema();
        for (size_t s = 0; s < schema.slots.size(); ++s) {
          const float number = schema.slots[s].name == "one" ? 1.0f : 2.0f;
          const int column = static_cast<int>(s) + 1;
          try {
            if (t == 0) {
              rows.assign(rows.size(), number);
              table->UpsertColumns(keys.data(), kCount, {{column, rows.data(), 2, schema.generation}}, {},
                                   *pool);
              continue;
            }
            int64_t n = kCount;
            if (t == 1) {
              table->GatherColumns(keys.data(), n, {{column, rows.data(), 2, schema.generation}}, nullptr,
                                   Serial());
            } else {
              Exporter::Buffers out;
              out.columns.push_back({column, rows.data(), 2, schema.generation});
              n = table->Export()->Next(kCount, out, Serial());
            }
            for (int64_t i = 0; i < 2 * n; ++i) CHECK(rows[static_cast<size_t>(i)] == number);
          } catch (const Error& error) {
            CHECK(error.code() == ErrorCode::kFailedPrecondition);
          }
        }
      }
    });
  }
  for (int round = 0; round < 100; ++round) {
    table->EnsureSlots(both, *pool);
    table->EnsureSlots({both[1]}, Serial());
    table->EnsureSlots({both[1], both[0]}, *pool);
    table->EnsureSlots({both[0]}, Serial());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

void StepsFromManyThreadsLoseNothing(bool spilled) {
  TableOptions options;
  options.dim = 3;
  options.shards = 1;  // 100 rows of which 64 fit
  if (spilled) options = Spilled(options, 12);
  const auto table = Table::Create(options);
  const auto pool = MakeThreadPool(2);
  constexpr int kThreads = 4;
  constexpr int kSteps = 50;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 3000; ++i) keys.push_back(i % 100);
  const std::vector<float> ones(keys.size() * 3, 1.0f);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const Update update = MakeUpdate("sgd", {{"learning_rate", -1.0}});
      for (int step = 0; step < kSteps; ++step) {
        const ApplyCounts counts = table->Apply(keys.data(), nullptr, static_cast<int64_t>(keys.size()),
                                                ones.data(), update, {}, {1, 1}, *pool);
        CHECK(counts.updated == 100);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<float> out(100 * 3);
  table->Gather(keys.data(), 100, out.data(), Missing::kZeros, nullptr, 0, nullptr, *pool);
  for (float x : out) CHECK(x == 30.0f * kThreads * kSteps);
}

void BackgroundThreadsHaveTheLowestPriority() {
  const auto caller = std::this_thread::get_id();
  const int policy = sched_getscheduler(0);
  const std::unique_ptr<ParallelFor> threads = MakeBackgroundThreads(2);
  std::vector<std::atomic<int>> calls(500);
  threads->Run(500, [&](int64_t i) {
    ++calls[static_cast<size_t>(i)];
    CHECK(sched_getscheduler(0) == (std::this_thread::get_id() == caller ? policy : SCHED_IDLE));
  });
  for (const std::atomic<int>& count : calls) CHECK(count == 1);
  threads->Run(0, [](int64_t) { CHECK(false); });

  bool thrown = false;
  std::atomic<int> called{0};
  try {
    threads->Run(20, [&](int64_t i) {
      ++called;
      if (i == 3) throw std::runtime_error("the third");
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown && called == 20);
}

// On a machine that is never idle they get no turn.
void BackgroundWorkEndsWithoutThem() {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> lent{false};
  MakeBackgroundThreads(1)->Run(2, [&](int64_t) {
    if (std::this_thread::get_id() == caller) lent = true;
    while (!lent) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  CHECK(lent);
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::BackgroundThreadsHaveTheLowestPriority();
  kvtable::BackgroundWorkEndsWithoutThem();
  kvtable::StepsFromManyThreadsLoseNothing(false);
  kvtable::StepsFromManyThreadsLoseNothing(true);
  kvtable::SpinlockExcludes();
  kvtable::ReadersWhoWaitAreNext();
  kvtable::ASlowWriterHoldsUpNobodyElse();
  kvtable::ALongWriteLetsLookupsIn(false);
  kvtable::ALongWriteLetsLookupsIn(true);
  kvtable::LookupsWithoutASeatReadAsWell();
  kvtable::ColumnsFoundByNameAreNeverAnotherSlots();
  kvtable::PoolRunsFromManyThreadsAndRethrows();
  kvtable::EveryNewKeyIsInsertedByExactlyOneThread(false);
  kvtable::EveryNewKeyIsInsertedByExactlyOneThread(true);
  kvtable::AccumulateLosesNothing();
  kvtable::EveryOperationAtOnceLeavesRowsWhole(false);
  kvtable::EveryOperationAtOnceLeavesRowsWhole(true);
  return 0;
}
