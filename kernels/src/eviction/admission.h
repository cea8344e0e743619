// Whether a training lookup inserts a key that is missing. One source for CPU and GPU.
#pragma once

#include <cstdint>

#include "base/hash.h"
#include "base/host_device.h"

namespace kvtable {

class Admission {
 public:
  // `probability` is from 0 to 1.
  Admission(double probability, uint64_t seed)
      : bound_(probability * 0x1p53), seed_(Mix64(seed ^ 0x9e3779b97f4a7c15ULL)) {}

  // A function of seed and key (widened).
  KVTABLE_HOST_DEVICE bool Admits(uint64_t key) const {
    return static_cast<double>(Mix64(key ^ seed_) >> 11) < bound_;
  }

 private:
  double bound_;  // of 53 bits of the hash, as a double holds them
  uint64_t seed_;
};

}  // namespace kvtable
