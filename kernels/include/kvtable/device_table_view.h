// A table in device memory with the interface of those on the CPU, for callers that serve both.
#pragma once

#include <memory>

#include "kvtable/device_table.h"
#include "kvtable/device_work.h"
#include "kvtable/table.h"

namespace kvtable {

// Where the arrays lie that a caller gives.
enum class ArraysIn : uint8_t {
  kHost,    // they are copied to the device and back, and an operation returns when its results are there
  kDevice,  // an operation is queued on ParallelFor::stream(), and returns at once but where it counts
};

// Where a ParallelFor has no stream, work is queued on that of the table's making.
//
// What differs from tables on the CPU: no update begins at positions, so a lookup that inserts notes 0 for
// every key that has a row then; KeysAt throws; and Apply counts nothing. Exports go to host memory, whatever
// `arrays` says.
std::shared_ptr<Table> ViewOf(std::shared_ptr<DeviceTable> table, std::shared_ptr<DeviceWork> work,
                              ArraysIn arrays);

// What a view is of; null for a table on the CPU.
DeviceTable* DeviceTableOf(Table* table);

// The same table, for arrays in device memory; a table on the CPU is returned as it is.
std::shared_ptr<Table> ViewInPlace(const std::shared_ptr<Table>& table);

}  // namespace kvtable
