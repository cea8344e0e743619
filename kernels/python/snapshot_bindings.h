// What kvtools._snapshot is made of.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtable {

class SnapshotTable;

void BindSnapshots(nanobind::module_& m);
void BindSnapshotLevels(nanobind::module_& m, nanobind::class_<SnapshotTable>& table);  // Level
void BindSnapshotWriter(nanobind::module_& m);
void BindServing(nanobind::module_& m);   // answer, read_json_lookup, json_rows, json_flags
void BindPrepared(nanobind::module_& m);  // Epoch, PreparedLookup, RecentKeys, RequestIds, ShortWay, Tally
void BindResp(nanobind::module_& m);      // RespReader, RespTables, resp_answer

}  // namespace kvtable
