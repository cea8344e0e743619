// Rounding float32 to a 16-bit type at random, so that the mean is exact.
#pragma once

#include <cstdint>

#include "base/always_inline.h"
#include "base/host_device.h"
#include "values/elements.h"
#include "values/float16.h"

namespace kvtable {

// Rounds |f| <= the largest finite number.
KVTABLE_HOST_DEVICE KVTABLE_ALWAYS_INLINE inline BFloat16 RoundStochastically(float f, uint32_t random,
                                                                              BFloat16) {
  // Numbers of one binade lie evenly, and binades adjoin: adding below the last bit that stays carries into
  // it with the right probability.
  return {static_cast<uint16_t>((BitsOf(f) + (random >> 16)) >> 16)};
}

KVTABLE_HOST_DEVICE KVTABLE_ALWAYS_INLINE inline Float16 RoundStochastically(float f, uint32_t random,
                                                                             Float16) {
  const uint32_t bits = BitsOf(f);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + (random >> 19)) >> 13;
  // Below 2^-14, the numbers are the multiples of 2^-24.
  const uint32_t is_subnormal = magnitude < 0x38800000u;
  const float multiple = FloatOf(magnitude & (0u - is_subnormal)) * 0x1p24f;
  const int32_t whole = static_cast<int32_t>(multiple);
  const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;  // [0, 1)
  const uint32_t up = uniform < multiple - static_cast<float>(whole);
  const uint32_t subnormal = static_cast<uint32_t>(whole) + up;
  const uint32_t rounded = (normal & (is_subnormal - 1u)) | (subnormal & (0u - is_subnormal));
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

template <class T>
inline constexpr uint32_t kLargestBits = 0;  // of the largest finite number, as a float
template <>
inline constexpr uint32_t kLargestBits<BFloat16> = 0x7f7f0000u;
template <>
inline constexpr uint32_t kLargestBits<Float16> = 0x477fe000u;  // 65,504

// What is exact stays as it is; what is beyond the largest finite number rounds to nearest.
template <class T>
KVTABLE_HOST_DEVICE KVTABLE_ALWAYS_INLINE inline T StoreStochastically(float f, uint32_t random) {
  const uint32_t rounded = RoundStochastically(f, random, T{}).bits;
  const uint32_t nearest = Element<T>::Store(f).bits;
  // Masks: GCC vectorizes no loop in which it sees a branch.
  const uint32_t is_large = (BitsOf(f) & 0x7fffffffu) > kLargestBits<T>;  // or infinite, or NaN
  return {static_cast<uint16_t>((rounded & (is_large - 1u)) | (nearest & (0u - is_large)))};
}

}  // namespace kvtable
