// The table on a CUDA device: its kernels are compiled here, but for those in cuda_*_rules.cu and
// cuda_sort.cu.
#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "cuda_device.h"
#include "cuda_rules.h"
#include "device_table_impl.h"
#include "kvtable/device_table.h"

namespace kvtable {

std::unique_ptr<DeviceTable> MakeCudaTable(const DeviceTableOptions& options) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    cudaGetLastError();
    throw Error(ErrorCode::kFailedPrecondition,
                "Table '" + options.name + "' was to be on a CUDA device, and there is none: " +
                    (status == cudaSuccess ? "no device" : cudaGetErrorString(status)) +
                    ". Place it on the CPU, or see what nvidia-smi says.");
  }
  return std::make_unique<DeviceTableImpl<CudaDevice>>(CudaDevice(), options);
}

}  // namespace kvtable
