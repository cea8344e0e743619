#include "threads_table.h"

#include <memory>

#include "device_table_impl.h"
#include "threads_device.h"

namespace kvtable {

std::unique_ptr<DeviceTable> MakeThreadsTable(const DeviceTableOptions& options, ParallelFor* threads,
                                              size_t memory) {
  return std::make_unique<DeviceTableImpl<ThreadsDevice>>(ThreadsDevice(threads, memory), options);
}

}  // namespace kvtable
