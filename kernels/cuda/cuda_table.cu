// The table on a CUDA device: its kernels are compiled here, but for those in cuda_*_rules.cu and
// cuda_sort.cu.
#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "cuda_device.h"
#include "cuda_rules.h"
#include "device_table_impl.h"
#include "device_work_impl.h"
#include "kvtable/device_table.h"
#include "kvtable/device_work.h"

namespace kvtable {

namespace {

void RequireDevice(const std::string& who) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    cudaGetLastError();
    throw Error(ErrorCode::kFailedPrecondition,
                who + " was to be on a CUDA device, and there is none: " +
                    (status == cudaSuccess ? "no device" : cudaGetErrorString(status)) +
                    ". Place it on the CPU, or see what nvidia-smi says.");
  }
}

}  // namespace

bool IsBuiltWithCuda() { return true; }

std::unique_ptr<DeviceTable> MakeCudaTable(const DeviceTableOptions& options) {
  RequireDevice("Table '" + options.name + "'");
  return std::make_unique<DeviceTableImpl<CudaDevice>>(CudaDevice(options.allocator), options);
}

std::unique_ptr<DeviceWork> MakeCudaWork(DeviceAllocator* allocator) {
  RequireDevice("Work on tables");
  return std::make_unique<DeviceWorkImpl<CudaDevice>>(CudaDevice(allocator));
}

}  // namespace kvtable
