#include "table/change_log.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kvtable/table.h"

namespace kvtable {

uint64_t ChangeLog::NextNumber() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void ChangeLog::GiveBack(const ShardChanges& changes) {
  if (changes.room != nullptr) {
    changes.room->left.fetch_add(static_cast<int64_t>(changes.removed.size()), std::memory_order_relaxed);
  }
}

uint64_t ChangeLog::Close(Version changes) noexcept {
  closed_.push_back({NextNumber(), std::move(changes)});
  const uint64_t number = closed_.back().number;
  while (closed_.size() > static_cast<size_t>(Table::kMostVersions)) {
    ForgetOldest();
    why_ = Why::kMostVersions;
  }
  return number;
}

void ChangeLog::Reset(Why why) noexcept {
  while (!closed_.empty()) ForgetOldest();
  known_since_ = NextNumber();
  why_ = why;
}

void ChangeLog::ForgetOldest() {
  for (const auto& changes : closed_.front().changes) GiveBack(*changes);
  known_since_ = closed_.front().number;
  closed_.erase(closed_.begin());
}

void ChangeLog::Forget(uint64_t upto) {
  if (!IsOwn(upto)) return;
  while (!closed_.empty() && closed_.front().number <= upto) {
    ForgetOldest();
    why_ = Why::kForgotten;
  }
}

bool ChangeLog::IsOwn(uint64_t version) const {
  return version == known_since_ || std::any_of(closed_.begin(), closed_.end(), [&](const Closed& closed) {
           return closed.number == version;
         });
}

std::string ChangeLog::Unknown(uint64_t since) const {
  return "What changed since version " + std::to_string(since) + " of the table is not known: ";
}

std::string ChangeLog::LostByRoom(uint64_t since) const {
  return Unknown(since) + "more than " + std::to_string(max_removed_) + " rows were removed.";
}

std::string ChangeLog::Lost(uint64_t since) const {
  if (!on()) return Unknown(since) + "its changes are not tracked.";
  const bool is_own = IsOwn(since);
  if (!is_own && since > known_since_) return Unknown(since) + "it has no such version.";
  if (!is_own) {
    switch (why_) {
      case Why::kBegun:
        return Unknown(since) + "tracking began later, or another table has taken its place.";
      case Why::kCleared:
        return Unknown(since) + "the table was cleared.";
      case Why::kSlots:
        return Unknown(since) + "its slots changed.";
      case Why::kForgotten:
        return Unknown(since) + "it was told to forget.";
      case Why::kMostVersions:
        return Unknown(since) + "more than " + std::to_string(Table::kMostVersions) +
               " versions have ended since.";
    }
  }
  for (const Closed& version : closed_) {
    if (version.number <= since) continue;
    const bool lost = std::any_of(version.changes.begin(), version.changes.end(),
                                  [](const auto& changes) { return changes->lost; });
    if (lost) return LostByRoom(since);
  }
  return "";
}

int64_t ChangeLog::bytes() const {
  int64_t bytes = 0;
  for (const Closed& version : closed_) {
    for (const auto& changes : version.changes) bytes += changes->bytes();
  }
  return bytes;
}

std::vector<std::shared_ptr<const ShardChanges>> ChangeLog::Since(uint64_t since, size_t shard) const {
  std::vector<std::shared_ptr<const ShardChanges>> found;
  for (const Closed& version : closed_) {
    if (version.number > since) found.push_back(version.changes[shard]);
  }
  return found;
}

}  // namespace kvtable
