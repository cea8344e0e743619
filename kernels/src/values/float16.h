// The two 16-bit float types, as bits: conversion to and from float32, rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace kvtable {

KVTABLE_HOST_DEVICE inline uint32_t BitsOf(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return bits;
}
KVTABLE_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

KVTABLE_HOST_DEVICE inline float ToFloat(BFloat16 x) { return FloatOf(static_cast<uint32_t>(x.bits) << 16); }

KVTABLE_HOST_DEVICE inline float ToFloat(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatOf(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
  if (magnitude < 0x0400u) {  // zero, subnormal: a multiple of 2^-24
    return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
}

KVTABLE_HOST_DEVICE inline BFloat16 ToBFloat16(float f) {
  const uint32_t bits = BitsOf(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return {static_cast<uint16_t>(bits >> 16 | 0x40u)};  // keep a NaN one
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

KVTABLE_HOST_DEVICE inline Float16 ToFloat16(float f) {
  const uint32_t bits = BitsOf(f);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu))};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65,520 and up round to infinity
  if (magnitude < 0x38800000u) {  // below the smallest normal: the float adder rounds to a multiple of 2^-24
    return {static_cast<uint16_t>(sign | (BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f)))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13))};
}

}  // namespace kvtable
