// Names of types and arrays of keys, as the classes of kvtools._snapshot take them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "kvtable/types.h"

namespace kvtable {

inline constexpr const char* kKeyTypeNames[] = {"int64", "int32", "uint64"};
inline constexpr const char* kValueTypeNames[] = {"float32", "float16", "bfloat16", "float64",
                                                  "int8",    "int32",   "int64",    "bool"};
// By their numbers in the file; none is 0.
inline constexpr const char* kCounterNames[] = {"",       "uint32", "int64", "uint64", "int32",
                                                "uint16", "int16",  "uint8", "int8"};

inline const char* NameOf(KeyType type) { return kKeyTypeNames[static_cast<size_t>(type)]; }
inline const char* NameOf(ValueType type) { return kValueTypeNames[static_cast<size_t>(type)]; }

template <class T, size_t kCount>
T TypeNamed(const char* const (&names)[kCount], const std::string& name) {
  for (size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<T>(i);
  }
  ThrowValue("a snapshot has no type " + name + ".");
}

// Keys of any shape as 64-bit patterns.
class KeyPatterns {
 public:
  KeyPatterns(nb::handle keys, KeyType type) : view_("keys", keys, DtypeNamed(NameOf(type)), false) {
    if (type == KeyType::kInt32) {
      const auto* const narrow = static_cast<const int32_t*>(view_.data());
      wide_.assign(narrow, narrow + view_.size());
    }
  }
  const int64_t* data() const {
    return wide_.empty() ? static_cast<const int64_t*>(view_.data()) : wide_.data();
  }
  int64_t size() const { return view_.size(); }
  const Shape& shape() const { return view_.shape(); }

 private:
  ArrayView view_;
  std::vector<int64_t> wide_;
};

}  // namespace kvtable
