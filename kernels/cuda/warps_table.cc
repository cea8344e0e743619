// What threads_table.h declares, by the emulated warps of a GPU: tests that link this in place of threads_table.cc run the
// code of warps, as a GPU would.
#include <memory>

#include "device_table_impl.h"
#include "device_work_impl.h"
#include "threads_table.h"
#include "warps_device.h"

namespace kvtable {

std::unique_ptr<DeviceTable> MakeThreadsTable(const DeviceTableOptions& options, ParallelFor* threads,
                                              size_t memory) {
  return std::make_unique<DeviceTableImpl<WarpsDevice>>(WarpsDevice(threads, memory, options.allocator),
                                                        options);
}

std::unique_ptr<DeviceWork> MakeThreadsWork(DeviceAllocator* allocator, ParallelFor* threads) {
  return std::make_unique<DeviceWorkImpl<WarpsDevice>>(WarpsDevice(threads, SIZE_MAX, allocator));
}

}  // namespace kvtable
