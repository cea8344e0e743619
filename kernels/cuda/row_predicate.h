// Whether a row is meant, by its key, its stamp and its score.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "device_rows.h"
#include "kvtable/device_table.h"

namespace kvtable {

KVTABLE_HOST_DEVICE inline uint64_t ScoreOf(const DeviceRows& rows, uint32_t row) {
  return rows.ranks.ranks == nullptr ? 0 : rows.ranks.ranks[row].score;
}

KVTABLE_HOST_DEVICE inline uint64_t OrderOf(const DeviceRows& rows, uint32_t row) {
  if (rows.ranks.ranks == nullptr || !rows.ranks.ranks[row].IsRanked()) return 0;
  return rows.ranks.ranks[row].Bare().order;
}

// Reads of the row only what the predicate asks for: rows lie anywhere, and most lists are of all of them.
KVTABLE_HOST_DEVICE inline bool Holds(const RowPredicate& predicate, const DeviceRows& rows, uint64_t key,
                                      uint32_t row) {
  const uint64_t masked = key & predicate.key_mask;
  if (masked < predicate.least_key || masked > predicate.most_key) return false;
  if (predicate.least_frequency != 0 || predicate.most_frequency != UINT32_MAX ||
      predicate.least_version != 0 || predicate.most_version != UINT32_MAX) {
    const DeviceStamp stamp = *rows.StampOf(row);
    if (stamp.frequency < predicate.least_frequency || stamp.frequency > predicate.most_frequency ||
        stamp.version < predicate.least_version || stamp.version > predicate.most_version) {
      return false;
    }
  }
  if (predicate.least_score == 0 && predicate.most_score == UINT64_MAX) return true;
  const uint64_t score = ScoreOf(rows, row);
  return score >= predicate.least_score && score <= predicate.most_score;
}

}  // namespace kvtable
