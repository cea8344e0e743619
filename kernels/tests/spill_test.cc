// Tables that keep most rows in a file: against tables that have all of them in memory, to the bit, and on disks that are
// full or fail.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "increments.h"
#include "kvtable/bags.h"
#include "kvtable/expiry.h"
#include "kvtable/optimizer.h"
#include "kvtable/pool_rows.h"
#include "kvtable/table.h"
#include "pool.h"
#include "spill/file_calls.h"
#include "spill/file_pages.h"
#include "spilled.h"
#include "throws.h"

namespace kvtable {
namespace {

constexpr int64_t kMostBytes = (kDim + kDim + 2 + kDim) * 4;  // of a row with any slots of these tests

TableOptions Options(int shards = 2) {
  TableOptions options;
  options.dim = kDim;
  options.shards = shards;
  options.slots = {kSlot};
  options.initializer.kind = Initializer::Kind::kUniform;
  options.initializer.a = -1;
  options.initializer.b = 1;
  return options;
}

const SlotSpec kCopied = {"copied", kDim, SlotSpec::Init::kCopyValue, 0.0};

// Two tables that go through the same: one has all rows in memory.
struct Pair {
  explicit Pair(const TableOptions& options)
      : memory(Table::Create(options)), spilled(Table::Create(Spilled(options, kMostBytes))) {}
  template <class Body>
  void Both(const Body& body) {
    body(memory.get());
    body(spilled.get());
  }
  std::unique_ptr<Table> memory;
  std::unique_ptr<Table> spilled;
};

// Steps of several rules, over slots that are there.
void Train(Table* table, Random random, uint64_t key_range) {
  const int64_t n = 150;
  std::vector<int64_t> keys;
  std::vector<float> gradients;
  for (int64_t i = 0; i < n; ++i) {
    keys.push_back(static_cast<int64_t>(random.Next(key_range)) - 100);
    for (int64_t j = 0; j < kDim; ++j) gradients.push_back(static_cast<float>(random.Next(100)) - 50);
  }
  std::vector<float> rows(gradients.size());
  std::vector<uint64_t> positions(keys.size());
  const Stamp stamp = {1, static_cast<uint32_t>(random.Next(1000))};
  Insertion insertion;
  insertion.stamp = stamp;
  table->GatherOrInsert(keys.data(), n, {rows.data(), positions.data()}, insertion, Pool());
  const RowSchema schema = table->schema();
  const auto step = [&](const Update& update, const SlotColumns& slots) {
    const bool located = random.Next(2) == 0;
    table->Apply(keys.data(), located ? positions.data() : nullptr, n, gradients.data(), update, slots, stamp,
                 Pool());
  };
  step(MakeUpdate("sgd", {{"learning_rate", 0.1}}), {});
  if (!schema.slots.empty() && schema.slots[0].width == kDim) {
    step(MakeUpdate("adagrad", {{"learning_rate", 0.1}}), {{1}, schema.generation});
    step(MakeUpdate("momentum", {{"learning_rate", 0.1}, {"momentum", 0.9}}), {{1}, schema.generation});
  }
  if (schema.slots.size() > 2) {
    step(MakeUpdate("adam", {{"learning_rate", 0.1}, {"beta_1_power", 0.5}, {"beta_2_power", 0.5}}),
         {{1, 3}, schema.generation});
  }
}

void CheckSame(Pair* pair, uint64_t key_range) {
  CHECK(pair->memory->Size() == pair->spilled->Size());
  CHECK(Contents(pair->memory.get()) == Contents(pair->spilled.get()));
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < static_cast<int64_t>(key_range); ++i) keys.push_back(i - 100);
  const int64_t n = static_cast<int64_t>(keys.size());
  std::vector<float> a(keys.size() * kDim), b(a.size());
  const auto found_a = std::make_unique<bool[]>(keys.size());
  const auto found_b = std::make_unique<bool[]>(keys.size());
  pair->memory->Gather(keys.data(), n, a.data(), Missing::kInitial, nullptr, 0, found_a.get(), Pool());
  pair->spilled->Gather(keys.data(), n, b.data(), Missing::kInitial, nullptr, 0, found_b.get(), Pool());
  CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  CHECK(std::equal(found_a.get(), found_a.get() + n, found_b.get()));
  const std::vector<SlotSpec> slots = pair->memory->slots();
  for (size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].width != kDim) continue;
    const int column = static_cast<int>(s) + 1;
    pair->memory->GatherColumns(keys.data(), n, {{column, a.data(), kDim}}, nullptr, Pool());
    pair->spilled->GatherColumns(keys.data(), n, {{column, b.data(), kDim}}, nullptr, Pool());
    CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }
}

// Any operation, the same of both, over and over.
void ASpilledTableIsATable(int64_t max_capacity, Eviction eviction, uint64_t seed) {
  constexpr uint64_t kRange = 3000;
  TableOptions options = Options();
  options.max_capacity = max_capacity;
  options.eviction = eviction;
  auto clock = std::make_shared<uint64_t>(1000000);  // scores are the same
  options.clock = [clock] { return *clock; };
  Pair pair(options);
  Random random(seed);
  uint64_t version[2] = {};
  for (int round = 0; round < 250; ++round) {
    *clock += 1000000;
    const uint64_t what = random.Next(20);
    const Random own(random.Next(uint64_t{1} << 60));
    int side = 0;
    pair.Both([&](Table* table) {
      Random same = own;
      uint64_t* const since = &version[side++];
      if (what < 8) {
        WriteSomething(table, &same, kRange);
      } else if (what < 16) {
        Train(table, same, kRange);
      } else if (what == 16) {
        const std::vector<std::vector<SlotSpec>> choices = {
            {kSlot}, {kSlot, kOther}, {kSlot, kOther, kCopied}, {kCopied, kSlot}, {kCopied}};
        table->EnsureSlots(choices[same.Next(choices.size())], Pool());
        *since = 0;
      } else if (what == 17) {
        EvictPolicy policy;
        policy.kind = same.Next(2) == 0 ? EvictPolicy::Kind::kBelowNorm : EvictPolicy::Kind::kKeepTop;
        policy.norm = 1.5;
        policy.count = 2000;
        policy.by = RankBy::kNorm;
        Evict(table, policy, Pool());
      } else if (what == 18 && same.Next(8) == 0) {
        table->Clear();
      } else if (what == 19 && table->tracks_changes()) {
        *since = table->CutChanges();
      } else {
        table->TrackChanges(10000);
      }
    });
    if (round % 25 == 24) CheckSame(&pair, kRange);
    if (round % 50 == 49 && version[0] != 0 && pair.memory->ChangesLost(version[0]).empty()) {
      Rows rows[2];
      std::set<int64_t> removed[2];
      side = 0;
      pair.Both([&](Table* table) {
        MomentOptions since;
        since.since = version[side];
        const auto exporter = table->ExportMoment(since);
        // What changes before its turn is put aside, from the file, too.
        Random same = own;
        int writes = 3;
        ReadInto(exporter.get(), table->schema(), 50, Pool(), &rows[side], [&] {
          if (writes-- > 0) Train(table, same, kRange);
        });
        removed[side] = RemovedKeys(*exporter);
        version[side++] = exporter->version();
      });
      CHECK(rows[0] == rows[1] && removed[0] == removed[1]);
    }
  }
  CHECK(pair.spilled->Memory().rows_read > 1000);
  const MemoryUse use = pair.spilled->Memory();
  CHECK(use.rows == pair.memory->Size());
}

// The memory of rows is what was said, whatever comes; the file takes about twice the rows in it, and is given back.
void MemoryAndFileAreBounded() {
  constexpr int64_t kRows = 20000;
  const TableOptions options = Spilled(Options(), kMostBytes, 256);
  const auto table = Table::Create(options);
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < kRows; ++i) keys.push_back(i);
  std::vector<float> rows(kRows * kDim, 1.0f);
  Random random(3);
  for (int round = 0; round < 10; ++round) {
    table->Accumulate(keys.data(), kRows, rows.data(), true, {}, Pool());
    for (int64_t& key : keys) key = static_cast<int64_t>(random.Next(kRows));
    const MemoryUse use = table->Memory();
    CHECK(use.row_bytes + use.slack_bytes <= options.max_memory);
    const int64_t record = 2 * kDim * 4 + 8;
    CHECK(use.spilled_rows > kRows * 9 / 10);
    CHECK(use.file_bytes < (3 * use.spilled_rows + 20 * 256) * record);
  }
  table->Clear();
  CHECK(table->Memory().file_bytes == 0);
  CHECK(table->Memory().spilled_rows == 0);
}

// Rows that are only looked up stay where they are; what was brought in and not written goes without being written.
void LookupsWriteNothing() {
  const auto table = Table::Create(Spilled(Options(), kMostBytes));
  constexpr int64_t kRows = 2000;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < kRows; ++i) keys.push_back(i);
  std::vector<float> rows(kRows * kDim);
  for (int i = 0; i < 4; ++i) table->GatherOrInsert(keys.data(), kRows, rows.data(), {}, nullptr, Pool());
  const int64_t written = table->Memory().rows_written;
  CHECK(written > 0);
  std::vector<float> again(rows.size());
  table->Gather(keys.data(), kRows, again.data(), Missing::kZeros, nullptr, 0, nullptr, Pool());
  table->GatherOrInsert(keys.data(), kRows, again.data(), {}, nullptr, Pool());
  CHECK(rows == again);
  CHECK(table->Memory().rows_written == written);
}

// Tables of which rows are wanted, eight at a time, by updates or by training lookups alone.
struct Wanted {
  std::unique_ptr<Table> table = Table::Create(Spilled(Options(), kDim * 2 * 4, 128));  // 256 rows
  bool is_update = true;

  void Some(int64_t first, int64_t n) {
    std::vector<int64_t> keys(static_cast<size_t>(n));
    std::iota(keys.begin(), keys.end(), first);
    std::vector<float> rows(keys.size() * kDim, 1.0f);
    if (is_update) {
      table->Accumulate(keys.data(), n, rows.data(), true, {}, Serial());
    } else {
      table->GatherOrInsert(keys.data(), n, rows.data(), {}, nullptr, Serial());
    }
  }
  // How many rows were read for it.
  int64_t All(int64_t first, int64_t n) {
    const int64_t before = table->Memory().rows_read;
    for (int64_t begin = first; begin < first + n; begin += 8) Some(begin, 8);
    return table->Memory().rows_read - before;
  }
};

// Rows that come once do not push out those that several batches have wanted.
void AScanPushesOutNothingInUse() {
  constexpr int64_t kInUse = 200;
  Wanted wanted;
  int64_t next = kInUse;  // keys that come once
  for (int i = 0; i < 20; ++i) {
    wanted.All(0, kInUse);
    wanted.All(next, 32);
    next += 32;
  }
  wanted.All(next, 2000);
  CHECK(wanted.All(0, kInUse) < kInUse / 4);
}

// What is wanted over and over comes to stay, whatever was in use before, and whether or not it is written.
void WhatIsWantedComesToStay() {
  for (const bool is_update : {true, false}) {
    for (const int64_t wanted_rows : {40, 200}) {
      Wanted wanted;
      wanted.All(0, 1000);
      for (int i = 0; i < 20; ++i) wanted.All(0, 240);
      wanted.is_update = is_update;
      for (int i = 0; i < 100; ++i) wanted.All(600, wanted_rows);
      CHECK(wanted.All(600, wanted_rows) < wanted_rows / 8);
    }
  }
}

int FilesOpenInFolder() {
  int count = 0;
  DIR* const all = ::opendir("/proc/self/fd");
  for (const dirent* entry = ::readdir(all); entry != nullptr; entry = ::readdir(all)) {
    char target[512];
    const ssize_t size = ::readlinkat(::dirfd(all), entry->d_name, target, sizeof(target));
    count += size > 0 && std::string(target, static_cast<size_t>(size)).find(SpillFolder()) == 0 ? 1 : 0;
  }
  ::closedir(all);
  return count;
}

int NamesInFolder() {
  int count = 0;
  DIR* const all = ::opendir(SpillFolder().c_str());
  while (::readdir(all) != nullptr) ++count;
  ::closedir(all);
  return count - 2;  // . and ..
}

void TheFileHasNoNameAndGoesWithItsTable() {
  const int before = FilesOpenInFolder();
  auto one = Table::Create(Spilled(Options(), kMostBytes));
  auto two = Table::Create(Spilled(Options(), kMostBytes));  // beside it, in the same folder
  Random random(1);
  for (int i = 0; i < 100; ++i) Train(one.get(), random, 5000);
  CHECK(FilesOpenInFolder() == before + 2);
  CHECK(NamesInFolder() == 0);
  one.reset();
  CHECK(FilesOpenInFolder() == before + 1);
}

void ImpossibleOptionsSayWhy() {
  const auto refused = [](const TableOptions& options, const char* part) {
    return Throws(ErrorCode::kInvalidArgument, part, [&] { Table::Create(options); });
  };
  TableOptions options = Spilled(Options(), kMostBytes);
  options.name = "emb";
  options.spill = "/not/there";
  CHECK(refused(options,
                "Table 'emb' cannot keep rows in its spill folder '/not/there': No such file or directory."));
  options.spill = "/proc/self/status";
  CHECK(refused(options, "Name a folder on a local disk in spill=, not a file."));
  options.spill = "/proc";  // not even root may write there
  CHECK(refused(options, "in which this process may write"));
  options.spill = "";
  CHECK(refused(options, "Name one on a local disk in spill="));
  options.spill = SpillFolder();
  options.max_memory = 0;
  CHECK(refused(options, "Give max_memory="));
  options.max_memory = -1;
  CHECK(refused(options, "-1"));
  options.max_memory = 1000;
  CHECK(refused(options, "Table 'emb' keeps rows in a file in its spill folder"));
  CHECK(refused(options, "need max_memory=2176 at least"));
  options.max_memory = 2176;  // 2 shards of 16 rows of 48 + 20 bytes
  const auto table = Table::Create(options);
  Random random(1);
  for (int i = 0; i < 20; ++i) Train(table.get(), random, 3000);
  const Rows before = Contents(table.get());
  CHECK(Throws(ErrorCode::kInvalidArgument,
               "need max_memory=", [&] { table->EnsureSlots({kSlot, kOther}, Pool()); }));
  CHECK(table->slots().size() == 1);
  CHECK(Contents(table.get()) == before);
}

// ---- Disks that fail

FileCalls& Calls() { return SpillCalls(); }
const FileCalls kSystem = SpillCalls();
std::atomic<int64_t> allowed{0};  // bytes, or calls

int AllocateSome(int file, off_t offset, off_t bytes) {
  return (allowed -= bytes) >= 0 ? kSystem.allocate(file, offset, bytes) : ENOSPC;
}
ssize_t WriteSome(int file, const void* from, size_t bytes, off_t offset) {
  if (--allowed < 0) return errno = EIO, -1;
  return kSystem.write(file, from, bytes > 100 ? bytes / 2 : bytes, offset);  // short ones are gone on with
}
ssize_t ReadSome(int file, void* to, size_t bytes, off_t offset) {
  if (--allowed < 0) return errno = EIO, -1;
  return kSystem.read(file, to, bytes > 20 ? bytes / 2 : bytes, offset);
}
ssize_t ReadNothingAtOnce(int, void*, size_t, off_t) { return errno = EAGAIN, -1; }
int NothingInMemory(void*, size_t bytes, unsigned char* pages) {
  std::fill_n(pages, bytes / FilePages::kPageBytes, static_cast<unsigned char>(0));
  return 0;
}
int CannotTell(void*, size_t, unsigned char*) { return errno = ENOSYS, -1; }
ssize_t ReadDamaged(int file, void* to, size_t bytes, off_t offset) {
  const ssize_t read = kSystem.read(file, to, bytes, offset);
  if (read > 0) static_cast<char*>(to)[read - 1] ^= 1;
  return read;
}

// As on a machine whose memory is short: what was there is gone at any time.
int SomeInMemory(void* mapping, size_t bytes, unsigned char* pages) {
  static std::atomic<uint64_t> calls{0};
  const int result = kSystem.in_memory(mapping, bytes, pages);
  Random random(++calls);
  for (size_t page = 0; page < bytes / FilePages::kPageBytes; ++page) {
    if (random.Next(3) == 0) pages[page] = 0;
  }
  return result;
}

struct SystemCallsAgain {
  ~SystemCallsAgain() { Calls() = kSystem; }
};

// Rows are the same whether they are read where the system has them or from the file.
void WhatIsInMemoryChangesNoRow() {
  const SystemCallsAgain again;
  for (const auto in_memory : {SomeInMemory, NothingInMemory, CannotTell}) {
    Calls().in_memory = in_memory;
    ASpilledTableIsATable(0, Eviction::kLru, 5);
  }
}

// A file of several mappings, with holes: what is read there is what was written, and what is not in memory is not read.
void PagesOfAFile() {
  const int file = ::open(SpillFolder().c_str(), O_TMPFILE | O_RDWR, 0600);
  if (file < 0) return;  // a file system that has none
  constexpr size_t kPage = FilePages::kPageBytes;
  constexpr uint64_t kFirst = uint64_t{1} << 24;
  CHECK(::ftruncate(file, static_cast<off_t>(3 * kFirst)) == 0);
  FilePages pages(file);
  FilePages::Range range;
  std::vector<char> bytes(5 * kPage);
  Random random(1);
  for (char& byte : bytes) byte = static_cast<char>(random.Next(256));
  for (const uint64_t at : {uint64_t{0}, kFirst - 5 * kPage, kFirst - 2 * kPage, kFirst,
                            2 * kFirst - 2 * kPage, 2 * kFirst + 7 * kPage}) {
    CHECK(::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(at)) ==
          static_cast<ssize_t>(bytes.size()));
    const uint64_t end = at + bytes.size();
    // What lies in one mapping; the first two begin at multiples of the first one's size.
    const uint64_t known = std::min(end, (at / kFirst + 1) * kFirst);
    CHECK(pages.Ask(at + 100, end, &range));
    for (int i = 0; i < 200; ++i) {
      const uint64_t begin = at + random.Next(bytes.size());
      const size_t size = 1 + random.Next(end - begin);
      const char* const found = range.Find(begin, size);
      CHECK((found != nullptr) == (begin + size <= known));
      CHECK(found == nullptr || std::memcmp(found, bytes.data() + (begin - at), size) == 0);
    }
    CHECK(range.Find(at - 1, 2) == nullptr && range.Find(end - 1, kPage) == nullptr);
  }
  // Holes, and what the file has no more of, are not in memory.
  pages.Ask(10 * kPage, 12 * kPage, &range);
  CHECK(range.Find(10 * kPage, 1) == nullptr);
  pages.Ask(3 * kFirst + 10 * kPage, 3 * kFirst + 11 * kPage, &range);
  CHECK(range.Find(3 * kFirst + 10 * kPage, 1) == nullptr);
  pages.Ask(uint64_t{1} << 60, (uint64_t{1} << 60) + 1, &range);
  CHECK(range.Find(uint64_t{1} << 60, 1) == nullptr);
  ::close(file);
  // Nothing is told of what cannot be mapped.
  int ends[2];
  CHECK(::pipe(ends) == 0);
  FilePages none(ends[0]);
  for (int i = 0; i < 2; ++i) CHECK(!none.Ask(0, kPage, &range) && range.Find(0, 1) == nullptr);
  ::close(ends[0]);
  ::close(ends[1]);
}

// Writes go on until one is refused; nothing that was there has changed then, but by writes that were done.
void NothingIsLostWhereWritesFail(bool is_full) {
  const SystemCallsAgain again;
  Pair pair(Options());
  Random random(5);
  const auto write = [&](Table* table, int64_t key, float number) {
    const std::vector<float> value(kDim, number);
    table->Upsert(&key, 1, value.data(), {1, 1}, Serial());
  };
  allowed = is_full ? 40000 : 60;
  if (is_full) {
    Calls().allocate = AllocateSome;
  } else {
    Calls().write = WriteSome;
  }
  int refused = 0;
  for (int64_t i = 0; i < 6000; ++i) {
    const int64_t key = static_cast<int64_t>(random.Next(3000));
    try {
      write(pair.spilled.get(), key, static_cast<float>(i));
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kResourceExhausted);
      const std::string text = error.what();
      CHECK(text.find("'spilled'") != std::string::npos && text.find(SpillFolder()) != std::string::npos);
      CHECK(text.find("Nothing is lost") != std::string::npos);
      ++refused;
      continue;
    }
    write(pair.memory.get(), key, static_cast<float>(i));
  }
  CHECK(refused > 100);
  CheckSame(&pair, 3000);  // all of them can be looked up and saved
  Calls() = kSystem;       // there is room again
  for (int64_t i = 0; i < 3000; ++i) pair.Both([&](Table* table) { write(table, i, 7.0f); });
  CheckSame(&pair, 3000);
}

// A table whose file cannot grow any more still trains the rows that it has: what is dead in the file makes room.
void AFullDiskStillTrains() {
  const SystemCallsAgain again;
  Pair pair(Options());
  Random random(5);
  for (int i = 0; i < 60; ++i) {
    pair.Both([&, same = random](Table* table) { Train(table, same, 2000); });
    random.Next(2);
  }
  allowed = 0;
  Calls().allocate = AllocateSome;
  std::vector<int64_t> keys;
  for (const auto& entry : Contents(pair.memory.get())) keys.push_back(entry.first);
  std::vector<float> gradients(keys.size() * kDim, 0.5f);
  for (int i = 0; i < 20; ++i) {
    pair.Both([&](Table* table) {
      table->Apply(keys.data(), nullptr, static_cast<int64_t>(keys.size()), gradients.data(),
                   MakeUpdate("sgd", {{"learning_rate", 0.1}}), {}, {}, Pool());
    });
  }
  CheckSame(&pair, 2000);
}

void NothingIsLostWhereReadsFail() {
  const SystemCallsAgain again;
  Pair pair(Options());
  Random random(5);
  for (int i = 0; i < 30; ++i) {
    const Random own(random.Next(1000000));
    pair.Both([&](Table* table) { Train(table, own, 3000); });
  }
  const Rows before = Contents(pair.memory.get());
  std::vector<int64_t> keys;
  for (const auto& entry : before) keys.push_back(entry.first);
  const int64_t n = static_cast<int64_t>(keys.size());
  std::vector<float> rows(keys.size() * kDim);
  Calls().read = ReadSome;
  Calls().read_at_once = ReadNothingAtOnce;
  Calls().in_memory = NothingInMemory;
  for (int64_t reads = 0; reads < 300; reads += 37) {
    const auto fails = [&](const auto& body) {
      allowed = reads;
      return Throws(ErrorCode::kFailedPrecondition, SpillFolder().c_str(), body);
    };
    CHECK(fails([&] {
      pair.spilled->Gather(keys.data(), n, rows.data(), Missing::kZeros, nullptr, 0, nullptr, Pool());
    }));
    CHECK(fails([&] { Contents(pair.spilled.get()); }));
    CHECK(fails([&] {
      EvictPolicy policy;
      policy.kind = EvictPolicy::Kind::kBelowNorm;
      policy.norm = 1e-6;
      Evict(pair.spilled.get(), policy, Pool());
    }));
    // Values stay: the gradients are zeros.
    std::fill(rows.begin(), rows.end(), 0.0f);
    CHECK(fails([&] { pair.spilled->Accumulate(keys.data(), n, rows.data(), false, {}, Pool()); }));
  }
  Calls() = kSystem;
  const auto values = [](Table* table, const std::vector<int64_t>& of) {
    std::vector<float> all(of.size() * kDim);
    table->Gather(of.data(), static_cast<int64_t>(of.size()), all.data(), Missing::kZeros, nullptr, 0,
                  nullptr, Pool());
    return all;
  };
  CHECK(values(pair.memory.get(), keys) == values(pair.spilled.get(), keys));
  Calls().read = ReadDamaged;
  Calls().read_at_once = ReadNothingAtOnce;
  Calls().in_memory = NothingInMemory;
  CHECK(Throws(ErrorCode::kFailedPrecondition, "checksum", [&] { values(pair.spilled.get(), keys); }));
  // A damaged row is not copied as if it were whole: what is evicted goes elsewhere.
  Calls() = kSystem;
  CHECK(values(pair.memory.get(), keys) == values(pair.spilled.get(), keys));
}

// Pooled lookups read rows where they lie, but those in the file.
void PooledLookupsAreTheSame() {
  constexpr int64_t kRows = 2000;
  constexpr int64_t kIds = 6000;
  constexpr int64_t kBags = kIds / 5;
  Pair pair(Options());
  std::vector<int64_t> keys, ids, splits;
  std::vector<float> rows;
  for (int64_t i = 0; i < kRows; ++i) {
    keys.push_back(i);
    for (int64_t j = 0; j < kDim; ++j) rows.push_back(static_cast<float>(i + j) / 3);
  }
  pair.Both([&](Table* table) { table->Upsert(keys.data(), kRows, rows.data(), {1, 1}, Pool()); });
  Random random(5);
  for (int64_t i = 0; i < kIds; ++i) ids.push_back(static_cast<int64_t>(random.Next(kRows + kRows / 8)));
  for (int64_t bag = 0; bag <= kBags; ++bag) splits.push_back(bag * (kIds / kBags));
  BagsInput input;
  input.keys = ids.data();
  input.n = kIds;
  input.bags = kBags;
  input.splits = splits.data();
  const Bags bags(input);
  for (const bool insert : {false, true}) {
    MissingKeys missing;
    missing.insert = insert;
    missing.missing = Missing::kInitial;
    missing.stamp = {1, 2};
    std::vector<float> pooled[2];
    int side = 0;
    pair.Both([&](Table* table) {
      std::vector<float>& out = pooled[side++];
      out.resize(kBags * kDim);
      // By one thread, for how often a new key is counted depends on who looks it up first.
      PoolRows({{{table}, &bags, Combiner::kMean, out.data(), missing}}, Serial());
      CHECK(table->Size() == kRows || insert);
    });
    CHECK(std::memcmp(pooled[0].data(), pooled[1].data(), pooled[0].size() * sizeof(float)) == 0);
    CheckSame(&pair, kRows + kRows / 8 + 200);
  }
}

// Slots come and go while rows do, from several threads, and no disk has room for more.
void SlotsChangeBesideWrites() {
  const auto table = Table::Create(Spilled(Options(), kMostBytes));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (Random random(t); !stop;) {
        try {
          if (t == 0) {
            table->EnsureSlots(random.Next(2) == 0 ? std::vector<SlotSpec>{kSlot}
                                                   : std::vector<SlotSpec>{kSlot, kOther, kCopied},
                               Serial());
          } else {
            Train(table.get(), Random(random.Next(1000000)), 4000);
          }
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kFailedPrecondition);  // slots found by an older schema
        }
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> keys(5000);
  std::vector<uint32_t> freqs(keys.size());
  Exporter::Buffers out;
  out.keys = keys.data();
  out.freqs = freqs.data();
  CHECK(table->Export()->Next(5000, out, Pool()) == table->Size());
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::ImpossibleOptionsSayWhy();
  kvtable::TheFileHasNoNameAndGoesWithItsTable();
  kvtable::LookupsWriteNothing();
  kvtable::MemoryAndFileAreBounded();
  kvtable::AScanPushesOutNothingInUse();
  kvtable::WhatIsWantedComesToStay();
  kvtable::PagesOfAFile();
  kvtable::WhatIsInMemoryChangesNoRow();
  kvtable::ASpilledTableIsATable(0, kvtable::Eviction::kLru, 1);
  kvtable::ASpilledTableIsATable(0, kvtable::Eviction::kLru, 2);
  kvtable::ASpilledTableIsATable(1500, kvtable::Eviction::kLru, 3);
  kvtable::ASpilledTableIsATable(1500, kvtable::Eviction::kLfu, 4);
  kvtable::NothingIsLostWhereWritesFail(true);
  kvtable::NothingIsLostWhereWritesFail(false);
  kvtable::AFullDiskStillTrains();
  kvtable::NothingIsLostWhereReadsFail();
  kvtable::PooledLookupsAreTheSame();
  kvtable::SlotsChangeBesideWrites();
  return 0;
}
