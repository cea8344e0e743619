// A device, for those who have arrays in its memory: what needs no table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvtable/device_table.h"
#include "kvtable/optimizer.h"
#include "kvtable/types.h"

namespace kvtable {

// SumByKey::Terms, in device memory.
struct SumTerms {
  int64_t sums = 0;
  const uint32_t* begins = nullptr;  // (sums + 1)
  const uint32_t* bags = nullptr;
  const void* scales = nullptr;
};

class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  // Device memory, freed behind what the stream has queued by then. Throws Error(kResourceExhausted).
  virtual std::shared_ptr<void> NewArray(size_t bytes, DeviceStream stream) = 0;

  // Between host and device, or within either. Waits until it is done.
  virtual void Copy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;

  // The same, queued. Memory of the host that is pinned, or written to, must stay until the stream is done.
  virtual void QueueCopy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;
  virtual void Fill(void* to, int byte, size_t bytes, DeviceStream stream) = 0;
  virtual void Wait(DeviceStream stream) = 0;

  // ApplyToArrays (optimizer.h) for arrays (n, dim) in device memory, queued: updates all rows, each by its own
  // gradient. False, and nothing is done, where a GPU would take longer than a CPU and the way there: for rows so
  // wide that the few lanes of each have much to do, as far as the rule couples elements; and where rows may be
  // left out (Update::skip_nonfinite), or gradients are of another type, or the device has no memory to work in. Throws Error(kInvalidArgument) as
  // ApplyToArrays does.
  virtual bool ApplyToArrays(const Update& update, ValueType value_type, int64_t dim,
                             const std::vector<void*>& columns, int64_t n, const void* gradients,
                             DeviceStream stream) = 0;

  // The sums that SumByKey::Terms describes, of rows in device memory.
  virtual void SumRows(ValueType value_type, int64_t dim, const SumTerms& terms,
                       const void* rows /* (, dim) */, void* out /* (sums, dim) */, DeviceStream stream) = 0;
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

// Whether there is anyone to make them: this library was built with CUDA, or a test has put others there.
bool HasDevices();
bool IsBuiltWithCuda();

}  // namespace kvtable
