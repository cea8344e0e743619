// The versions of a table in device memory: which eras they are (row_changes.h), which keys went in each, and
// the memory for what is noted. The table calls it within its operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_block.h"
#include "kvtable/table.h"
#include "row_changes.h"
#include "table/change_log.h"

namespace kvtable {

// Which versions are known, and why others are not, is ChangeLog's to say, as on the CPU: it has one shard
// here, of whose changes only the removed keys are there. In place of their rows these have the eras of their
// birth.
template <class Device>
class DeviceChangeLog {
 public:
  using Block = DeviceBlock<Device>;

  bool on() const { return log_.on(); }
  uint64_t newest() const { return log_.newest(); }
  void Forget(uint64_t upto) { log_.Forget(upto); }
  int64_t bytes() const { return static_cast<int64_t>(eras_.bytes() + removed_.bytes()) + log_.bytes(); }

  // What launches from now on note changes in.
  DeviceRowChanges view() const {
    if (!on()) return {};
    const int64_t room = std::max<int64_t>(0, log_.room()->left.load());
    const int64_t capacity =
        std::min<int64_t>(room, static_cast<int64_t>(removed_.bytes() / sizeof(RemovedKey)));
    return {eras_.template as<RowEras>(), removed_.template as<RemovedKey>(), count_.template as<uint32_t>(),
            static_cast<uint32_t>(capacity), era_};
  }

  // Begins to track. `allocate(bytes)` gives a block of device memory, or throws: then all is as it was.
  template <class Allocate>
  void Begin(Device* device, int64_t max_removed, int64_t rows, const Allocate& allocate) {
    max_removed_ = max_removed;
    count_ = allocate(sizeof(uint32_t));
    device->Fill(count_.data(), 0, count_.bytes());
    MakeRoom(device, rows, allocate);
    log_.Begin(max_removed);
    versions_ = {{log_.newest(), 0}};
    era_ = 1;
  }

  // Makes room for this many rows. In an era no more go than were there when it began, whatever the room.
  template <class Allocate>
  void Prepare(Device* device, int64_t rows, const Allocate& allocate) {
    if (on()) MakeRoom(device, rows, allocate);
  }

  // Why changes since a version are not known; empty where they are. Waits for the operations before.
  std::string Lost(Device* device, uint64_t since) const {
    std::string lost = log_.Lost(since);
    if (lost.empty() && ReadCount(device) > view().capacity) lost = log_.LostByRoom(since);
    return lost;
  }

  // The era that a version has ended, of a version that is known: what was written since is of a later one.
  uint32_t EraOf(uint64_t version) const {
    for (const auto& [number, era] : versions_) {
      if (number == version) return era;
    }
    return 0;
  }

  // Ends the era, and returns the version that ends with it. `went` may be null: takes the keys of rows that were there at
  // the version `since` and went after it, each once; some may be there again. Waits for the operations before.
  uint64_t Cut(Device* device, uint64_t since, std::vector<uint64_t>* went) {
    auto open = std::make_shared<ShardChanges>();
    const uint32_t count = ReadCount(device);
    const uint32_t noted = std::min(count, view().capacity);
    std::vector<RemovedKey> keys(noted);
    if (noted > 0) device->Copy(keys.data(), removed_.data(), noted * sizeof(RemovedKey));
    device->WaitInside();
    open->lost = count > noted;
    open->room = log_.room();
    for (const RemovedKey& key : keys) {
      open->removed.push_back(key.key);
      open->removed_rows.push_back(key.born);
    }
    if (went != nullptr) {
      auto changes = log_.Since(since, 0);
      changes.push_back(open);
      const uint32_t era = EraOf(since);
      for (const auto& version : changes) {
        for (size_t i = 0; i < version->removed.size(); ++i) {
          if (version->removed_rows[i] <= era) went->push_back(version->removed[i]);
        }
      }
      std::sort(went->begin(), went->end());
      went->erase(std::unique(went->begin(), went->end()), went->end());
    }
    log_.PrepareClose();
    versions_.reserve(versions_.size() + 1);
    log_.room()->left.fetch_sub(noted);
    const uint64_t version = log_.Close({std::move(open)});
    BeginEra(device, version);
    return version;
  }

  // All that is known is worth nothing any more.
  void Reset(Device* device, ChangeLog::Why why) {
    if (!on()) return;
    log_.Reset(why);
    versions_.clear();
    BeginEra(device, log_.newest());
  }

 private:
  void BeginEra(Device* device, uint64_t version) {
    device->Fill(count_.data(), 0, count_.bytes());
    versions_.push_back({version, era_++});
    // One from which changes are known before the oldest that is kept.
    constexpr size_t kMost = Table::kMostVersions + 1;
    if (versions_.size() > kMost) versions_.erase(versions_.begin());
  }

  uint32_t ReadCount(Device* device) const {
    uint32_t count = 0;
    device->Copy(&count, count_.data(), sizeof(count));
    device->WaitInside();
    return count;
  }

  template <class Allocate>
  void MakeRoom(Device* device, int64_t rows, const Allocate& allocate) {
    const size_t keys = static_cast<size_t>(std::min(rows, max_removed_));
    Block eras = Extended(device, eras_, static_cast<size_t>(rows) * sizeof(RowEras), allocate);
    Block removed = Extended(device, removed_, keys * sizeof(RemovedKey), allocate);
    if (eras.data() != nullptr) eras_ = std::move(eras);
    if (removed.data() != nullptr) removed_ = std::move(removed);
  }

  // None where the block is large enough.
  template <class Allocate>
  static Block Extended(Device* device, const Block& block, size_t bytes, const Allocate& allocate) {
    if (bytes <= block.bytes()) return {};
    Block extended = allocate(bytes);
    device->Fill(extended.data(), 0, bytes);
    if (block.data() != nullptr) device->Copy(extended.data(), block.data(), block.bytes());
    return extended;
  }

  ChangeLog log_;
  int64_t max_removed_ = 0;
  std::vector<std::pair<uint64_t, uint32_t>> versions_;  // and the era that each has ended; the oldest first
  uint32_t era_ = 0;
  Block eras_;
  Block removed_;
  Block count_;
};

}  // namespace kvtable
