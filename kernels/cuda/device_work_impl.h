// Work on arrays in device memory, over a Device: CudaDevice or, for tests, ThreadsDevice.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device_block.h"
#include "kvtable/device_work.h"
#include "pool_kernels.h"
#include "values/elements.h"

namespace kvtable {

template <class Device>
class DeviceWorkImpl : public DeviceWork {
 public:
  explicit DeviceWorkImpl(Device device) : state_(std::make_shared<State>(std::move(device))) {}

  std::shared_ptr<void> NewArray(size_t bytes, DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    if (bytes == 0) return nullptr;
    void* const memory = state_->device.Allocate(bytes, MemoryPlace::kDevice);
    if (memory == nullptr) {
      throw Error(ErrorCode::kResourceExhausted,
                  "Could not get " + std::to_string(bytes) +
                      " bytes of device memory for an array: " + state_->device.MemoryLeft() + ".");
    }
    return std::shared_ptr<void>(memory, [state = state_, bytes, stream](void* gone) {
      const Queue behind(state.get(), stream);
      state->device.Free(gone, bytes, MemoryPlace::kDevice);
    });
  }

  void Copy(void* to, const void* from, size_t bytes, DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    if (bytes > 0) state_->device.Copy(to, from, bytes);
    state_->device.WaitInside();
  }

  void QueueCopy(void* to, const void* from, size_t bytes, DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    if (bytes > 0) state_->device.Copy(to, from, bytes);
  }

  void Fill(void* to, int byte, size_t bytes, DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    if (bytes > 0) state_->device.Fill(to, byte, bytes);
  }

  void Wait(DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    state_->device.WaitInside();
  }

  void SumRows(ValueType value_type, int64_t dim, const SumTerms& terms, const void* rows, void* out,
               DeviceStream stream) override {
    const Queue queue(state_.get(), stream);
    VisitValueType(value_type, [&](auto t) {
      using T = decltype(t);
      const uint64_t width = static_cast<uint64_t>(dim);
      state_->device.Launch(static_cast<uint64_t>(terms.sums) * width,
                            SumRowsBody<T>{terms.begins, terms.bags,
                                           static_cast<const typename Element<T>::Compute*>(terms.scales),
                                           static_cast<uint64_t>(terms.sums), width,
                                           static_cast<const T*>(rows), static_cast<T*>(out)});
    });
  }

 private:
  struct State {
    explicit State(Device made) : device(std::move(made)) {}
    Device device;
    std::mutex mutex;
  };

  // Holds the device, and sends what is queued to a stream.
  class Queue {
   public:
    Queue(State* state, DeviceStream stream) : hold_(state->mutex), device_(&state->device) {
      device_->Begin(stream);
    }
    ~Queue() { device_->End(); }
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

   private:
    std::lock_guard<std::mutex> hold_;
    Device* device_;
  };

  std::shared_ptr<State> state_;
};

}  // namespace kvtable
