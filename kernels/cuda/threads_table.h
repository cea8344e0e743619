// The table in device memory with the CPU's threads as its device, to test it without a GPU. It is compiled
// in one file, for the time that takes; with KVTABLE_EMULATES_WARPS, its device is the emulated warps of a GPU
// (warps_device.h), so that a test runs the code of warps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "eviction_tuning.h"
#include "kvtable/device_table.h"
#include "kvtable/device_work.h"
#include "kvtable/parallel_for.h"

namespace kvtable {

// The threads outlive the table. Allocations beyond `memory` bytes fail.
std::unique_ptr<DeviceTable> MakeThreadsTable(const DeviceTableOptions& options, ParallelFor* threads,
                                              size_t memory = SIZE_MAX, const EvictionTuning& tuning = {});

// And work on arrays with the same device.
std::unique_ptr<DeviceWork> MakeThreadsWork(DeviceAllocator* allocator, ParallelFor* threads);

}  // namespace kvtable
