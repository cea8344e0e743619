// A device whose threads are those of a GPU, in warps and blocks, on the CPU's threads (emulated_block.h): blocks run at the
// same time, as many as there are threads. All that ThreadsDevice says holds here, too.
#pragma once

#include <cstdint>

#include "kvtable/parallel_for.h"
#include "lanes.h"
#include "threads_device.h"

namespace kvtable {

class WarpsDevice : public ThreadsDevice {
 public:
  using Lanes = Warp;

  using ThreadsDevice::ThreadsDevice;

  template <class Body>
  void Launch(uint64_t n, const Body& body) {
    const uint64_t blocks = (n + EmulatedBlock::kThreads - 1) / EmulatedBlock::kThreads;
    if (blocks == 0) return;
    threads_->Run(static_cast<int64_t>(blocks), [&](int64_t task) {
      const uint64_t block = static_cast<uint64_t>(task);
      EmulatedBlock::Current().Run(
          block, [&] { RunThread(body, block * EmulatedBlock::kThreads + threadIdx.x, n); });
    });
  }
};

}  // namespace kvtable
