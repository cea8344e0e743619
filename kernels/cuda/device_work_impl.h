// Work on arrays in device memory, over a Device: CudaDevice or, for tests, ThreadsDevice.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device_block.h"
#include "kvtable/device_work.h"
#include "pool_kernels.h"
#include "update_rows.h"
#include "values/elements.h"

namespace kvtable {

template <class Device>
class DeviceWorkImpl : public DeviceWork {
 public:
  explicit DeviceWorkImpl(Device device) : state_(std::make_shared<State>(std::move(device))) {}

  std::shared_ptr<void> NewArray(size_t bytes, DeviceStream stream) override {
    if (bytes == 0) return nullptr;
    void* memory = nullptr;
    {
      const Queue queue(state_.get(), stream);
      memory = state_->device.Allocate(bytes, MemoryPlace::kDevice);
    }
    if (memory == nullptr) {
      throw Error(ErrorCode::kResourceExhausted,
                  "Could not get " + std::to_string(bytes) +
                      " bytes of device memory for an array: " + state_->device.MemoryLeft() + ".");
    }
    return std::shared_ptr<void>(memory, [state = state_, bytes, stream](void* gone) {
      try {
        const Queue behind(state.get(), stream);
        state->device.Free(gone, bytes, MemoryPlace::kDevice);
      } catch (const Error&) {  // of a device that has failed, whose memory goes with the process
      }
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

  bool ApplyToArrays(const Update& update, ValueType value_type, int64_t dim,
                     const std::vector<void*>& columns, int64_t n, const void* gradients,
                     DeviceStream stream) override {
    CheckUpdate(update);
    CheckColumns(update, columns.size());
    // Where elements are alike, rows may be cut: as wide as lanes like them, and a last one.
    const bool draws = update.stochastic_rounding && SizeOf(value_type) == 2;
    const bool cuts = !CouplesElements(*update.optimizer) && !draws;
    if (update.skip_nonfinite || update.float32_gradients || (!cuts && dim > kWidestRow)) return false;
    const Queue queue(state_.get(), stream);
    Arrays arrays{columns, static_cast<const char*>(gradients)};
    if (!cuts) return UpdateArrays(update, value_type, dim, n, arrays);
    const int64_t whole = n * dim / kCutWidth;
    UpdateArrays(update, value_type, kCutWidth, whole, arrays);
    const int64_t done = whole * kCutWidth * SizeOf(value_type);
    for (void*& column : arrays.columns) column = static_cast<char*>(column) + done;
    arrays.gradients += done;
    if (n * dim % kCutWidth > 0) UpdateArrays(update, value_type, n * dim % kCutWidth, 1, arrays);
    return true;
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
  static constexpr int64_t kCutWidth = 64;
  static constexpr int64_t kWidestRow = int64_t{1} << 16;  // some thousand elements for each lane

  struct Arrays {
    std::vector<void*> columns;
    const char* gradients;
  };

  // False, and nothing is queued, where there is no working memory, which only rules that couple elements need.
  bool UpdateArrays(const Update& update, ValueType value_type, int64_t dim, int64_t n,
                    const Arrays& arrays) {
    if (n == 0 || dim == 0) return true;
    RowsToUpdate rows;
    rows.batch.n = static_cast<uint64_t>(n);
    rows.batch.gradients = arrays.gradients;
    rows.batch.dim = dim;
    rows.rows.row_bytes = dim * SizeOf(value_type);
    rows.arrays = static_cast<char*>(arrays.columns[0]);
    for (size_t c = 0; c < arrays.columns.size(); ++c) {
      rows.offsets[c] = static_cast<int64_t>(reinterpret_cast<intptr_t>(arrays.columns[c]) -
                                             reinterpret_cast<intptr_t>(arrays.columns[0]));
    }
    rows.decay = update.hyperparameters[0] * update.hyperparameters[1];
    rows.stochastic_rounding = update.stochastic_rounding;
    rows.seed = update.seed;
    WorkingMemory working = WorkingMemoryFor<Device>(*update.optimizer, value_type, dim, n);
    const DeviceBlock<Device> memory =
        working.bytes > 0
            ? DeviceBlock<Device>(&state_->device, static_cast<size_t>(working.bytes), MemoryPlace::kDevice)
            : DeviceBlock<Device>();
    if (working.bytes > 0 && memory.data() == nullptr) return false;
    working.memory = memory.data();
    UpdateRows(&state_->device, rows, update, value_type, working);
    return true;
  }

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
