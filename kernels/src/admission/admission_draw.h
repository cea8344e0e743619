// Whether a key that is missing may get a row, as far as that is a function of key and seed. One source for CPU
// and GPU.
#pragma once

#include <cstdint>
#include <optional>

#include "base/hash.h"
#include "base/host_device.h"

namespace kvtable {

class AdmissionDraw {
 public:
  // `probability` is from 0 to 1. The padding key (widened) is never admitted.
  AdmissionDraw(double probability, uint64_t seed, std::optional<uint64_t> padding_key)
      : bound_(probability * 0x1p53),
        seed_(Mix64(seed ^ 0x9e3779b97f4a7c15ULL)),
        has_padding_(padding_key.has_value()),
        padding_key_(padding_key.value_or(0)) {}

  bool AdmitsNone() const { return !(bound_ > 0); }

  // A function of seed and key (widened).
  KVTABLE_HOST_DEVICE bool Admits(uint64_t key) const {
    return static_cast<double>(Mix64(key ^ seed_) >> 11) < bound_ && !(has_padding_ && key == padding_key_);
  }

 private:
  double bound_;  // of 53 bits of the hash, as a double holds them
  uint64_t seed_;
  bool has_padding_;
  uint64_t padding_key_;
};

}  // namespace kvtable
