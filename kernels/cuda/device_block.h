// Memory of a device, owned.
#pragma once

#include <cstddef>
#include <utility>

namespace kvtable {

enum class MemoryPlace { kDevice, kPinnedHost };

// Freed when what has been queued so far on the device's stream is done.
template <class Device>
class DeviceBlock {
 public:
  DeviceBlock() = default;
  // data() is null where there is no memory.
  DeviceBlock(Device* device, size_t bytes, MemoryPlace place)
      : device_(device), bytes_(bytes), place_(place), data_(device->Allocate(bytes, place)) {
    if (data_ == nullptr) bytes_ = 0;
  }
  DeviceBlock(DeviceBlock&& other) noexcept { Swap(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    DeviceBlock moved(std::move(other));
    Swap(moved);
    return *this;
  }
  ~DeviceBlock() {
    if (data_ != nullptr) device_->Free(data_, bytes_, place_);
  }

  char* data() const { return static_cast<char*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void Swap(DeviceBlock& other) {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(place_, other.place_);
    std::swap(data_, other.data_);
  }

  Device* device_ = nullptr;
  size_t bytes_ = 0;
  MemoryPlace place_ = MemoryPlace::kDevice;
  void* data_ = nullptr;
};

}  // namespace kvtable
