#include "threads_table.h"

#include <memory>

#include "device_table_impl.h"
#include "device_work_impl.h"
#if defined(KVTABLE_EMULATES_WARPS)
#include "warps_device.h"
#else
#include "threads_device.h"
#endif

namespace kvtable {

namespace {

#if defined(KVTABLE_EMULATES_WARPS)
using Device = WarpsDevice;
#else
using Device = ThreadsDevice;
#endif

}  // namespace

std::unique_ptr<DeviceTable> MakeThreadsTable(const DeviceTableOptions& options, ParallelFor* threads,
                                              size_t memory, const EvictionTuning& tuning) {
  return std::make_unique<DeviceTableImpl<Device>>(Device(threads, memory, options.allocator), options,
                                                   tuning);
}

std::unique_ptr<DeviceWork> MakeThreadsWork(DeviceAllocator* allocator, ParallelFor* threads) {
  return std::make_unique<DeviceWorkImpl<Device>>(Device(threads, SIZE_MAX, allocator));
}

}  // namespace kvtable
