// Initial values in kernels: the same bits as src/initial_value.h gives on the CPU.
#pragma once

#include <cstdint>

#include "base/hash.h"
#include "base/host_device.h"
#include "kvtable/initializer.h"
#include "values/elements.h"
#include "values/random.h"

namespace kvtable {

struct DeviceInitialValue {
  Initializer::Kind kind = Initializer::Kind::kConstant;
  ValueType value_type = ValueType::kFloat32;
  int64_t dim = 0;
  int64_t value_bytes = 0;
  double a = 0.0;
  double b = 0.0;
  float below32 = 0.0f;  // see UniformDraw
  double below64 = 0.0;
  uint64_t seed = 0;
  const char* rows = nullptr;  // kConstant: one row; kRows: num_rows
  uint64_t num_rows = 0;
  bool has_padding = false;  // of the padding key it is zeros
  uint64_t padding_key = 0;

  KVTABLE_HOST_DEVICE bool IsDrawn() const {
    return kind != Initializer::Kind::kConstant && kind != Initializer::Kind::kRows;
  }

  KVTABLE_HOST_DEVICE bool IsPadding(uint64_t key) const { return has_padding && key == padding_key; }

  // Where the value lies ready; null where it is drawn, and for zeros.
  KVTABLE_HOST_DEVICE const char* Ready(uint64_t key) const {
    if (IsPadding(key)) return nullptr;
    if (kind == Initializer::Kind::kConstant) return rows;
    if (kind == Initializer::Kind::kRows) {
      return rows + Mix64(key) % num_rows * static_cast<uint64_t>(value_bytes);
    }
    return nullptr;
  }

  KVTABLE_HOST_DEVICE float Draw(uint32_t bits) const {
    const float a32 = static_cast<float>(a);
    const float b32 = static_cast<float>(b);
    if (kind == Initializer::Kind::kUniform) return UniformDraw(bits, a32, b32 - a32, below32);
    if (kind == Initializer::Kind::kNormal) return NormalDraw(bits, a32, b32);
    return TruncatedNormalDraw(bits, a32, b32);
  }
  KVTABLE_HOST_DEVICE double Draw(uint64_t bits) const {
    if (kind == Initializer::Kind::kUniform) return UniformDraw(bits, a, b - a, below64);
    if (kind == Initializer::Kind::kNormal) return NormalDraw(bits, a, b);
    return TruncatedNormalDraw(bits, a, b);
  }

  // A column of a drawn value.
  template <class T>
  KVTABLE_HOST_DEVICE T Drawn(uint64_t stream, uint64_t column) const {
    if constexpr (sizeof(T) == 8) {
      return Draw(RandomWord(stream, column));
    } else {
      return Element<T>::Store(
          Draw(static_cast<uint32_t>(RandomWord(stream, column / 2) >> (column % 2 * 32))));
    }
  }

  KVTABLE_HOST_DEVICE void StoreDrawn(uint64_t stream, uint64_t j, char* value) const {
    if (value_type == ValueType::kFloat64) {
      reinterpret_cast<double*>(value)[j] = Drawn<double>(stream, j);
    } else if (value_type == ValueType::kFloat32) {
      reinterpret_cast<float*>(value)[j] = Drawn<float>(stream, j);
    } else if (value_type == ValueType::kFloat16) {
      reinterpret_cast<Float16*>(value)[j] = Drawn<Float16>(stream, j);
    } else {
      reinterpret_cast<BFloat16*>(value)[j] = Drawn<BFloat16>(stream, j);
    }
  }

  // Writes the drawn value of each lane's key to its `value`, where that is not null. All lanes take part.
  template <class Lanes>
  KVTABLE_HOST_DEVICE void FillDrawn(const Lanes& lanes, uint64_t key, char* value) const {
    for (uint32_t owner = 0; owner < Lanes::kCount; ++owner) {
      char* const to = lanes.From(owner, value);
      const uint64_t stream = RandomStream(seed, lanes.From(owner, key));
      if (to == nullptr) continue;
      for (uint64_t j = lanes.lane(); j < static_cast<uint64_t>(dim); j += Lanes::kCount) {
        StoreDrawn(stream, j, to);
      }
    }
  }
};

}  // namespace kvtable
