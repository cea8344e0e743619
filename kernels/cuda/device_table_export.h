// The table in device memory: exports, by ranges of hashes.
#pragma once

#include "device_table_impl.h"
#include "export_kernels.h"

namespace kvtable {

template <class Device>
int64_t DeviceTableImpl<Device>::ExportNext(const ExportedRows& wanted, ExportProgress* progress,
                                            int64_t capacity, const DeviceExporter::Buffers& out,
                                            DeviceStream stream) {
  if (capacity < 1) {
    throw Error(ErrorCode::kInvalidArgument, "An export of table '" + options_.name + "' in chunks of " +
                                                 std::to_string(capacity) + " rows; expected at least 1.");
  }
  const Operation operation(this, stream);
  for (const ColumnOut& column : out.columns) CheckColumn(column);
  int64_t rows = 0;
  while (rows == 0 && !progress->ended) rows = ExportRange(wanted, progress, capacity, out);
  return rows;
}

template <class Device>
int64_t DeviceTableImpl<Device>::ExportRange(const ExportedRows& wanted, ExportProgress* progress,
                                             int64_t capacity, const DeviceExporter::Buffers& out) {
  const int64_t rows = std::max(int64_t{1}, RowsAtMost());
  const int64_t room = std::min(capacity, rows);
  PrepareScratch(room);
  // As many hashes as very likely have room for their keys; where few rows are meant, ever more of them.
  const double few = 4 * std::sqrt(static_cast<double>(room));
  const double expected = room == rows
                              ? static_cast<double>(rows)
                              : std::max(static_cast<double>(room) / 2, static_cast<double>(room) - few);
  double share = std::max(progress->share, expected / static_cast<double>(rows));
  for (;; share /= 2) {
    constexpr double kHashes = 18446744073709551616.0;  // 2^64
    const uint64_t left = UINT64_MAX - progress->next_hash;
    const bool is_last = share * kHashes >= static_cast<double>(left);
    const uint64_t last_hash =
        is_last ? UINT64_MAX : progress->next_hash + static_cast<uint64_t>(share * kHashes);
    const int64_t n = ListRows(wanted, progress->next_hash, last_hash, room, out);
    if (n > room) continue;  // look at fewer
    for (const ColumnOut& column : out.columns) {
      const RowLayout::Column& c = layout_.columns[static_cast<size_t>(column.column)];
      CopyOut(numbers(), n, nullptr, c.offset, c.bytes, column.data);
    }
    device_.WaitInside();
    progress->ended = is_last;
    progress->next_hash = last_hash + 1;
    progress->share = n < room / 4 ? 2 * share : share;
    return n;
  }
}

template <class Device>
int64_t DeviceTableImpl<Device>::ListRows(const ExportedRows& wanted, uint64_t first_hash, uint64_t last_hash,
                                          int64_t room, const DeviceExporter::Buffers& out) {
  uint32_t* const count = &words_.template as<Words>()->count;
  device_.Fill(count, 0, sizeof(uint32_t));
  const uint64_t first_home = index_.HomeOfHash(first_hash);
  const uint64_t last_home = index_.HomeOfHash(last_hash);
  const ChangedSince changed = wanted.changed.value_or(ChangedSince());
  device_.Launch(last_home - first_home + 1,
                 ListBody{index_, rows_, wanted.predicate, wanted.changed.has_value(), changed.era,
                          first_hash, last_hash, first_home, last_home, static_cast<uint32_t>(room), count,
                          numbers(), out.keys, narrow_});
  const int64_t n = ReadCount();
  const ListedBody beside{rows_,        Count(n),   numbers(),  out.freqs,
                          out.versions, out.scores, out.orders, changed.born};
  if (n > 0 && n <= room && !beside.HasNothing()) device_.Launch(Count(n), beside);
  return n;
}

}  // namespace kvtable
