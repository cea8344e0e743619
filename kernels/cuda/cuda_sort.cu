// The sort of batches on CUDA devices.
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "cuda_device.h"

namespace kvtable {

cudaError_t SortPairsOnCuda(void* scratch, size_t* bytes, const uint32_t* firsts, uint32_t* sorted_firsts,
                            const uint32_t* seconds, uint32_t* sorted_seconds, uint64_t n, int bits,
                            cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(scratch, *bytes, firsts, sorted_firsts, seconds, sorted_seconds, n,
                                         0, bits, stream);
}

}  // namespace kvtable
