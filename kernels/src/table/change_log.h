// The versions of a table of which it is known what they changed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "table/shard_changes.h"

namespace kvtable {

// A version's changes, a part for each shard.
using Version = std::vector<std::shared_ptr<const ShardChanges>>;

// Guarded by the table's `changes_mutex_`. What belongs to the open version is with the shards (RowWatch::log).
class ChangeLog {
 public:
  // What happened at the oldest version from which changes are known.
  enum class Why : uint8_t { kBegun, kCleared, kSlots, kForgotten, kMostVersions };

  // The numbers of versions, of all tables of the process.
  static uint64_t NextNumber();

  bool on() const { return room_ != nullptr; }
  RemovedRoom* room() const { return room_.get(); }
  uint64_t newest() const { return closed_.empty() ? known_since_ : closed_.back().number; }

  void Begin(int64_t max_removed) {
    room_ = std::make_shared<RemovedRoom>();
    room_->left.store(max_removed);
    max_removed_ = max_removed;
    known_since_ = NextNumber();
    why_ = Why::kBegun;
  }

  // The open version has ended: `changes` is what it changed. Returns its number. Needs PrepareClose, and cannot
  // fail then.
  uint64_t Close(Version changes) noexcept;
  void PrepareClose() { closed_.reserve(closed_.size() + 1); }
  // All that is known is worth nothing any more. The shards' open versions must be new ones.
  void Reset(Why why) noexcept;
  void Forget(uint64_t upto);  // nothing where it is no version of this table
  // A version that has ended, or never will: its removed keys leave room for others.
  static void GiveBack(const ShardChanges& changes);

  // Why changes since a version are not known; empty where they are.
  std::string Lost(uint64_t since) const;
  // The same where a removed key of the open version found no room.
  std::string LostByRoom(uint64_t since) const;
  int64_t bytes() const;  // of the versions that have ended
  // The changes of shard `shard` since a version that is known, those of the open one excepted.
  std::vector<std::shared_ptr<const ShardChanges>> Since(uint64_t since, size_t shard) const;

 private:
  struct Closed {
    uint64_t number;
    Version changes;
  };
  void ForgetOldest();
  bool IsOwn(uint64_t version) const;
  std::string Unknown(uint64_t since) const;

  std::shared_ptr<RemovedRoom> room_;  // null: off
  int64_t max_removed_ = 0;
  uint64_t known_since_ = 0;
  Why why_ = Why::kBegun;
  std::vector<Closed> closed_;  // the oldest first
};

}  // namespace kvtable
