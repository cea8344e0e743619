// What kvtools._snapshot is made of.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtable {

void BindSnapshots(nanobind::module_& m);
void BindSnapshotWriter(nanobind::module_& m);

}  // namespace kvtable
