// A device, for those who have arrays in its memory: what needs no table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvtable/bags.h"
#include "kvtable/device_table.h"
#include "kvtable/types.h"

namespace kvtable {

class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  // Device memory, freed behind what the stream has queued by then. Throws Error(kResourceExhausted).
  virtual std::shared_ptr<void> NewArray(size_t bytes, DeviceStream stream) = 0;

  // Between host and device, or within either. Waits until it is done.
  virtual void Copy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;

  // The same, queued: memory of the host must stay as it is until the stream is done.
  virtual void QueueCopy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;
  virtual void Fill(void* to, int byte, size_t bytes, DeviceStream stream) = 0;
  virtual void Wait(DeviceStream stream) = 0;

  // DeviceTable::SpreadGradient, for lookups of any table of this value type and dim.
  virtual void SpreadGradient(ValueType value_type, int64_t dim, const DeviceBags& bags,
                              const void* gradient /* (bags, dim) */, void* out /* (n, dim) */,
                              DeviceStream stream) = 0;
};

// On the current CUDA device. `allocator` may be null; see DeviceTableOptions. Throws
// Error(kFailedPrecondition) where there is no device, or where the library was built without CUDA.
std::unique_ptr<DeviceWork> MakeCudaWork(DeviceAllocator* allocator);

// Who makes tables and their devices: MakeCudaTable and MakeCudaWork, unless a test puts others in their
// place, that run on the CPU.
struct DeviceMakers {
  std::unique_ptr<DeviceTable> (*table)(const DeviceTableOptions& options) = MakeCudaTable;
  std::unique_ptr<DeviceWork> (*work)(DeviceAllocator* allocator) = MakeCudaWork;
};
DeviceMakers& Devices();

}  // namespace kvtable
