// MakeCudaTable where the library is built without CUDA.
#include <memory>
#include <string>

#include "kvtable/device_table.h"

namespace kvtable {

std::unique_ptr<DeviceTable> MakeCudaTable(const DeviceTableOptions& options) {
  throw Error(
      ErrorCode::kFailedPrecondition,
      "Table '" + options.name +
          "' was to be on a CUDA device, and this library was built without CUDA. Build it with nvcc and "
          "-DKVTOOLS_CUDA=on, or place the table on the CPU.");
}

}  // namespace kvtable
