#include "threads_table.h"

#include <memory>

#include "device_table_impl.h"
#include "device_work_impl.h"
#include "threads_device.h"

namespace kvtable {

std::unique_ptr<DeviceTable> MakeThreadsTable(const DeviceTableOptions& options, ParallelFor* threads,
                                              size_t memory) {
  return std::make_unique<DeviceTableImpl<ThreadsDevice>>(ThreadsDevice(threads, memory, options.allocator),
                                                          options);
}

std::unique_ptr<DeviceWork> MakeThreadsWork(DeviceAllocator* allocator, ParallelFor* threads) {
  return std::make_unique<DeviceWorkImpl<ThreadsDevice>>(ThreadsDevice(threads, SIZE_MAX, allocator));
}

}  // namespace kvtable
