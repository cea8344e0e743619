// MakeCudaTable and MakeCudaWork where the library is built without CUDA.
#include <memory>
#include <string>

#include "kvtable/device_table.h"
#include "kvtable/device_work.h"

namespace kvtable {

namespace {

[[noreturn]] void Refuse(const std::string& who) {
  throw Error(
      ErrorCode::kFailedPrecondition,
      who +
          " was to be on a CUDA device, and this library was built without CUDA. Build it with nvcc and "
          "-DKVTOOLS_CUDA=on, or place it on the CPU.");
}

}  // namespace

bool IsBuiltWithCuda() { return false; }

std::unique_ptr<DeviceTable> MakeCudaTable(const DeviceTableOptions& options) {
  Refuse("Table '" + options.name + "'");
}

std::unique_ptr<DeviceWork> MakeCudaWork(DeviceAllocator* /*allocator*/) { Refuse("Work on tables"); }

}  // namespace kvtable
