// Snapshots against a map: written in memory and through the disk, read back, damaged, cut.
#include "kvtable/snapshot.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "pool.h"
#include "snapshot/format.h"
#include "snapshot/key_sorter.h"
#include "snapshot/snapshot_level.h"
#include "snapshot/snapshot_writer.h"
#include "throws.h"

namespace kvtable {
namespace {

constexpr int64_t kDim = 5;

std::string NewPath() {
  static std::atomic<int> number{0};
  const char* const folder = std::getenv("TMPDIR");
  return std::string(folder != nullptr ? folder : "/tmp") + "/snapshot_test." + std::to_string(getpid()) +
         "." + std::to_string(number++);
}

// Deleted at the end of its scope.
struct File {
  File() : path(NewPath()) {}
  ~File() { unlink(path.c_str()); }
  std::string path;
};

std::vector<int64_t> SomeKeys(int64_t n, uint64_t seed) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i)
    keys.push_back(static_cast<int64_t>(Mix64(seed + static_cast<uint64_t>(i))));
  if (n > 4) keys[0] = INT64_MIN, keys[1] = INT64_MAX, keys[2] = 0, keys[3] = -1;
  return keys;
}

// Row i has i in all places.
std::map<int64_t, float> Write(const std::string& path, const std::vector<int64_t>& keys, int64_t memory) {
  const auto n = static_cast<int64_t>(keys.size());
  SnapshotWriter writer(path, memory);
  SnapshotTablePlan plan;
  plan.name = "emb";
  plan.dim = kDim;
  plan.rows = n;
  writer.BeginTable(plan);
  writer.AddKeys(keys.data(), n);
  std::map<int64_t, float> rows;
  for (int64_t i = 0; i < n; ++i) rows[keys[static_cast<size_t>(i)]] = static_cast<float>(i);
  CHECK(writer.SortKeys(Pool()) == n - static_cast<int64_t>(rows.size()));
  // From two threads, and not in order.
  const auto add = [&](int64_t first, int64_t last) {
    std::vector<float> values;
    for (int64_t i = first; i < last; ++i) values.insert(values.end(), kDim, static_cast<float>(i));
    writer.AddRows(first, last - first, values.data(), nullptr, nullptr);
  };
  std::thread other(add, n / 2, n);
  for (int64_t i = 0; i < n / 2; i += 100) add(i, std::min(n / 2, i + 100));
  other.join();
  writer.EndTable();
  writer.Close("{}");
  return rows;
}

void FindsWhatAMapHas() {
  for (const int64_t n : {0, 1, 3, 64, 5000}) {
    for (const int64_t memory : {int64_t{1} << 30, int64_t{1} << 10}) {
      const File file;
      std::vector<int64_t> keys = SomeKeys(n, 7);
      for (size_t i = 10; i < keys.size(); i += 10) keys[i] = keys[i - 3];
      const std::map<int64_t, float> rows = Write(file.path, keys, memory);
      const std::shared_ptr<Snapshot> snapshot = Snapshot::Open(file.path);
      const SnapshotTable& table = *snapshot->table("emb");
      CHECK(table.rows() == static_cast<int64_t>(rows.size()));
      std::vector<int64_t> asked = SomeKeys(200, 99);
      asked.insert(asked.end(), keys.begin(), keys.end());
      std::vector<float> values(asked.size() * kDim);
      std::vector<uint8_t> found(asked.size());
      std::vector<int64_t> numbers(asked.size());
      const auto count = static_cast<int64_t>(asked.size());
      const int64_t absent = table.Lookup(asked.data(), count, values.data(), found.data());
      table.Find(asked.data(), count, numbers.data());
      int64_t expected_absent = 0;
      for (size_t i = 0; i < asked.size(); ++i) {
        const auto row = rows.find(asked[i]);
        expected_absent += row == rows.end();
        CHECK(found[i] == (row != rows.end()));
        CHECK((numbers[i] >= 0) == (row != rows.end()));
        for (int64_t j = 0; j < kDim; ++j) {
          CHECK(values[i * kDim + static_cast<size_t>(j)] == (row == rows.end() ? 0.0f : row->second));
        }
      }
      CHECK(absent == expected_absent);
      std::vector<int64_t> all(rows.size());
      table.ReadKeys(0, table.rows(), all.data());
      for (const int64_t key : all) CHECK(rows.count(key) == 1);
      CHECK(snapshot->Verify(Pool()));
      CHECK(snapshot->Populate(Pool()) && snapshot->warm());
    }
  }
}

void SortsKeysHoweverEqual() {
  std::vector<MixedKey> keys;
  for (uint64_t i = 0; i < 30000; ++i) keys.push_back({i % 3 == 0 ? 5 : Mix64(i) >> (i % 64), 30000 - i});
  std::vector<MixedKey> expected = keys;
  const auto before = [](const MixedKey& a, const MixedKey& b) {
    return a.mixed != b.mixed ? a.mixed < b.mixed : a.row < b.row;
  };
  std::sort(expected.begin(), expected.end(), before);
  SortMixedKeys(keys.data(), static_cast<int64_t>(keys.size()), Pool());
  CHECK(std::memcmp(keys.data(), expected.data(), keys.size() * sizeof(MixedKey)) == 0);
}

void MixedKeysAreUnmixed() {
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t key = Mix64(i) ^ i << 60;
    CHECK(snapshot_format::UnmixKey(Mix64(key)) == key);
  }
}

// Keys that all fall into one bucket, as somebody who knows the mix can choose them.
void FindsKeysOfOneBucket() {
  std::vector<int64_t> keys;
  for (uint64_t i = 0; i < 3000; ++i) keys.push_back(static_cast<int64_t>(snapshot_format::UnmixKey(i * 5)));
  const File file;
  const std::map<int64_t, float> rows = Write(file.path, keys, 1 << 20);
  const std::shared_ptr<Snapshot> snapshot = Snapshot::Open(file.path);
  for (uint64_t i = 0; i < 15010; ++i) {
    const auto key = static_cast<int64_t>(snapshot_format::UnmixKey(i));
    int64_t row = 0;
    snapshot->table("emb")->Find(&key, 1, &row);
    CHECK((row >= 0) == (rows.count(key) == 1));
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr int kReaders = 1;  // pages that are replaced under another reader are a race, and meant
#else
constexpr int kReaders = 3;
#endif

void ACutFileThrowsInEveryThread() {
  const File file;
  const std::vector<int64_t> keys = SomeKeys(200000, 3);
  Write(file.path, keys, 1 << 30);
  const std::shared_ptr<Snapshot> snapshot = Snapshot::Open(file.path);
  const SnapshotTable& table = *snapshot->table("emb");
  std::atomic<int> thrown{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kReaders; ++t) {
    threads.emplace_back([&] {
      std::vector<float> values(1000 * kDim);
      for (int64_t i = 0;; i = (i + 1000) % 200000) {
        try {
          CHECK(table.Lookup(keys.data() + i, 1000, values.data()) == 0);
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kFailedPrecondition);
          ++thrown;
          return;
        }
      }
    });
  }
  CHECK(truncate(file.path.c_str(), 4096) == 0);
  for (std::thread& thread : threads) thread.join();
  CHECK(thrown == kReaders);
  CHECK(Throws(ErrorCode::kFailedPrecondition, [&] { snapshot->Populate(Pool()); }));
}

// While a writer damages rows and keys in place and heals them, at any pace, and another compares the file with its
// checksums, every row that is given is the right one.
void RowsOfAFileThatIsWrittenToAreRightOrNone() {
  const File file;
  constexpr int64_t kKeys = 300000;
  const std::vector<int64_t> keys = SomeKeys(kKeys, 3);
  std::map<int64_t, float> expected = Write(file.path, keys, 1 << 30);
  const std::shared_ptr<Snapshot> snapshot = Snapshot::Open(file.path);
  const SnapshotTable& table = *snapshot->table("emb");
  std::atomic<bool> over{false};
  std::atomic<int64_t> right{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> values(200 * kDim);
      for (int64_t i = t * 1000; !over; i = (i + 200) % kKeys) {
        try {
          CHECK(table.Lookup(keys.data() + i, 200, values.data()) == 0);
          for (int64_t j = 0; j < 200; ++j) {
            CHECK(values[static_cast<size_t>(j * kDim)] == expected.at(keys[static_cast<size_t>(i + j)]));
          }
          ++right;
        } catch (const Error&) {
          ++refused;
        }
      }
    });
  }
  threads.emplace_back([&] {
    const auto go_on = [&](int64_t, int64_t) { return !over.load(); };
    while (!over) {
      try {
        snapshot->Verify(Pool(), go_on);
      } catch (const Error&) {
      }
    }
  });
  const int descriptor = open(file.path.c_str(), O_RDWR);
  std::vector<char> sound(20000), junk(20000, 77);
  for (int round = 0; round < 24; ++round) {
    const auto section = round % 3 == 0 ? SnapshotTable::kKeys : SnapshotTable::kRows;
    const SnapshotTable::Range range = table.layout().sections[section];
    const off_t at = range.offset + range.bytes / 24 * round / 2 * 2;
    const auto bytes = static_cast<ssize_t>(sound.size());
    CHECK(pread(descriptor, sound.data(), sound.size(), at) == bytes);
    CHECK(pwrite(descriptor, junk.data(), junk.size(), at) == bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(round * 37 % 80));
    CHECK(pwrite(descriptor, sound.data(), sound.size(), at) == bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(round * 53 % 90));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  close(descriptor);
  over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(right > 0 && refused > 0);
  CHECK(snapshot->Verify(Pool()) && !snapshot->verifies_on_use());
}

// Levels over a file against a map, in any mix of changes, removals and merges; then the file that is made of them.
void LevelsOverAFileAreAMap() {
  const File file, folded;
  const std::vector<int64_t> keys = SomeKeys(3000, 9);
  std::map<int64_t, float> rows = Write(file.path, keys, 1 << 30);
  const std::shared_ptr<Snapshot> snapshot = Snapshot::Open(file.path);
  const SnapshotTable& base = *snapshot->table("emb");
  std::vector<std::shared_ptr<const SnapshotLevel>> levels;
  for (uint64_t round = 0; round < 7; ++round) {
    std::map<int64_t, float> changed;
    std::vector<int64_t> removed;
    for (uint64_t i = 0; i < 300; ++i) {
      const uint64_t draw = Mix64(round * 1000 + i);
      const int64_t key = draw % 4 == 0 ? static_cast<int64_t>(draw) : keys[draw % keys.size()];
      if (draw % 3 == 0) {
        removed.push_back(key);
      } else {
        changed[key] = static_cast<float>(round * 1000 + i);
      }
    }
    std::vector<int64_t> of;
    std::vector<float> values;
    for (const auto& [key, value] : changed) {
      of.push_back(key);
      values.insert(values.end(), kDim, value);
    }
    levels.insert(levels.begin(),
                  SnapshotLevel::Make(base, of.data(), static_cast<int64_t>(of.size()), values.data(),
                                      removed.data(), static_cast<int64_t>(removed.size())));
    for (const int64_t key : removed) rows.erase(key);
    for (const auto& [key, value] : changed) rows[key] = value;
    if (round % 3 == 1) {
      levels[1] = SnapshotLevel::Merge(*levels[1], *levels[0]);
      levels.erase(levels.begin());
    }
    std::vector<int64_t> asked = keys;
    for (const auto& [key, value] : rows) asked.push_back(key);
    asked.insert(asked.end(), removed.begin(), removed.end());
    const auto check = [&](const SnapshotTable& table) {
      const auto n = static_cast<int64_t>(asked.size());
      std::vector<float> out(asked.size() * kDim);
      std::vector<uint8_t> found(asked.size());
      table.Lookup(asked.data(), n, out.data(), found.data());
      std::vector<int64_t> numbers(asked.size());
      table.Find(asked.data(), n, numbers.data());
      for (size_t i = 0; i < asked.size(); ++i) {
        const auto row = rows.find(asked[i]);
        CHECK(found[i] == (row != rows.end()) && (numbers[i] >= 0) == (row != rows.end()));
        if (row == rows.end()) continue;
        for (int64_t j = 0; j < kDim; ++j) CHECK(out[i * kDim + static_cast<size_t>(j)] == row->second);
        int64_t key = 0;
        float taken[kDim];
        table.TakeKeys(&numbers[i], 1, &key);
        table.TakeRows(&numbers[i], 1, taken);
        CHECK(key == asked[i] && taken[0] == row->second);
      }
      CHECK(table.rows() == static_cast<int64_t>(rows.size()));
    };
    const SnapshotTable over = base.Overlaid(levels, static_cast<int64_t>(rows.size()));
    check(over);
    if (round != 6) continue;
    SnapshotWriter writer(folded.path, 1 << 20);
    CHECK(writer.CopyTable(over, Pool(), {}));
    writer.Close("{}");
    const std::shared_ptr<Snapshot> whole = Snapshot::Open(folded.path);
    CHECK(whole->Verify(Pool()));
    check(*whole->table("emb"));
  }
  const float row[kDim] = {};
  const int64_t twice[2] = {5, 5};
  CHECK(Throws(ErrorCode::kInvalidArgument, "key 5 comes twice", [&] {
    const float two[2 * kDim] = {};
    SnapshotLevel::Make(base, twice, 2, two, nullptr, 0);
  }));
  CHECK(SnapshotLevel::Make(base, twice, 1, row, twice, 2)->removed() == 0);
}

void ADamagedFileIsTold() {
  const File file;
  Write(file.path, SomeKeys(3000, 3), 1 << 30);
  const int descriptor = open(file.path.c_str(), O_RDWR);
  const char byte = 77;
  CHECK(pwrite(descriptor, &byte, 1, 40000) == 1);
  CHECK(Throws(ErrorCode::kInvalidArgument, "its rows from byte 0 on",
               [&] { Snapshot::Open(file.path)->Verify(Pool()); }));
  CHECK(pwrite(descriptor, &byte, 1, 50) == 1);
  CHECK(Throws(ErrorCode::kInvalidArgument, "header", [&] { Snapshot::Open(file.path); }));
  close(descriptor);
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::MixedKeysAreUnmixed();
  kvtable::SortsKeysHoweverEqual();
  kvtable::FindsWhatAMapHas();
  kvtable::FindsKeysOfOneBucket();
  kvtable::ACutFileThrowsInEveryThread();
  kvtable::RowsOfAFileThatIsWrittenToAreRightOrNone();
  kvtable::LevelsOverAFileAreAMap();
  kvtable::ADamagedFileIsTold();
  return 0;
}
