// One C++ type per ValueType: how its elements are read, computed with, and written.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/host_device.h"
#include "kvtable/types.h"
#include "values/float16.h"

namespace kvtable {

// `Compute` is what arithmetic is done in: float for the 16-bit types.
template <class T>
struct Element {
  using Compute = T;
  KVTABLE_HOST_DEVICE static Compute Load(T x) { return x; }
  KVTABLE_HOST_DEVICE static T Store(Compute x) { return x; }
  static T FromDouble(double x) { return static_cast<T>(x); }
};
template <>
struct Element<Float16> {
  using Compute = float;
  KVTABLE_HOST_DEVICE static float Load(Float16 x) { return ToFloat(x); }
  KVTABLE_HOST_DEVICE static Float16 Store(float x) { return ToFloat16(x); }
  static Float16 FromDouble(double x) { return ToFloat16(static_cast<float>(x)); }
};
template <>
struct Element<BFloat16> {
  using Compute = float;
  KVTABLE_HOST_DEVICE static float Load(BFloat16 x) { return ToFloat(x); }
  KVTABLE_HOST_DEVICE static BFloat16 Store(float x) { return ToBFloat16(x); }
  static BFloat16 FromDouble(double x) { return ToBFloat16(static_cast<float>(x)); }
};

// Whether `x` can be an element: integers have no fractions and end somewhere, bool (uint8_t) is 0 or 1.
template <class T>
bool IsElement(double x) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return x == 0 || x == 1;
  } else if constexpr (std::is_integral_v<T>) {
    // 2^(bits - 1) is a double, the largest value need not be.
    constexpr double kEnd = -static_cast<double>(std::numeric_limits<T>::min());
    return x >= -kEnd && x < kEnd && x == std::trunc(x);
  } else {
    return true;
  }
}

// Calls visit(T{}) with the type that stands for `type`, one of those that are trained.
template <class Visit>
decltype(auto) VisitValueType(ValueType type, const Visit& visit) {
  switch (type) {
    case ValueType::kFloat16:
      return visit(Float16{});
    case ValueType::kBFloat16:
      return visit(BFloat16{});
    case ValueType::kFloat64:
      return visit(double{});
    case ValueType::kFloat32:
      return visit(float{});
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  "Integer and bool values are not trained or pooled: they are looked up and written.");
  }
}

// The same for any type.
template <class Visit>
decltype(auto) VisitAnyValueType(ValueType type, const Visit& visit) {
  switch (type) {
    case ValueType::kInt8:
      return visit(int8_t{});
    case ValueType::kInt32:
      return visit(int32_t{});
    case ValueType::kInt64:
      return visit(int64_t{});
    case ValueType::kBool:
      return visit(uint8_t{});
    default:
      return VisitValueType(type, visit);
  }
}

// a + b. Integers wrap around; uint8_t stands for bool.
template <class T>
KVTABLE_HOST_DEVICE T AddElements(T a, T b) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return a | b;
  } else if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return Element<T>::Store(Element<T>::Load(a) + Element<T>::Load(b));
  }
}

// a * b and so on, in what T computes in.
template <class T>
KVTABLE_HOST_DEVICE T CombineElements(RowOp op, T a, T b) {
  using C = typename Element<T>::Compute;
  const C x = Element<T>::Load(a);
  const C y = Element<T>::Load(b);
  if (op == RowOp::kMultiply) return Element<T>::Store(x * y);
  if (op == RowOp::kDivide) return Element<T>::Store(x / y);
  return (op == RowOp::kMin) == (y < x) ? b : a;
}

// Calls visit(K{}) with int32_t or uint64_t: the 64-bit key types differ in name only.
template <class Visit>
decltype(auto) VisitKeyType(KeyType type, const Visit& visit) {
  return type == KeyType::kInt32 ? visit(int32_t{}) : visit(uint64_t{});
}

// A key as the index holds it: int32 sign-extended, 64 bits as they are.
KVTABLE_HOST_DEVICE inline uint64_t WidenKey(int32_t key) {
  return static_cast<uint64_t>(static_cast<int64_t>(key));
}
KVTABLE_HOST_DEVICE inline uint64_t WidenKey(uint64_t key) { return key; }

}  // namespace kvtable
