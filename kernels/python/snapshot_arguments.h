// Names of types and arrays of keys, as the classes of kvtools._snapshot take them.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
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

// What each call needs of NumPy, looked up once. Never freed: a module has no moment for that.
class Numpy {
 public:
  static Numpy& Get() {
    static auto* const numpy = new Numpy;
    return *numpy;
  }
  const nb::object& Dtype(const char* name) {
    nb::object& dtype = dtypes_[name];
    if (!dtype.is_valid()) dtype = DtypeNamed(name);
    return dtype;
  }
  nb::object Empty(const Shape& shape, const char* dtype) { return empty_(TupleOf(shape), Dtype(dtype)); }

 private:
  Numpy() : empty_(nb::module_::import_("numpy").attr("empty")) {}

  nb::object empty_;
  std::map<std::string, nb::object, std::less<>> dtypes_;
};

// A new array, and its memory. bfloat16, of which NumPy gives no buffer, is uint16 until it is taken.
class NewArray {
 public:
  NewArray(const Shape& shape, const char* dtype)
      : brain_(std::string_view(dtype) == "bfloat16"),
        array_(Numpy::Get().Empty(shape, brain_ ? "uint16" : dtype)) {
    if (PyObject_GetBuffer(array_.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0)
      throw nb::python_error();
  }
  ~NewArray() { PyBuffer_Release(&buffer_); }
  NewArray(const NewArray&) = delete;
  NewArray& operator=(const NewArray&) = delete;

  template <class T>
  T* data() const {
    return static_cast<T*>(buffer_.buf);
  }
  nb::object Take() const { return brain_ ? array_.attr("view")(Numpy::Get().Dtype("bfloat16")) : array_; }

 private:
  bool brain_;
  nb::object array_;
  Py_buffer buffer_ = {};
};

// Keys of any shape as 64-bit patterns.
class KeyPatterns {
 public:
  KeyPatterns(nb::handle keys, KeyType type) {
    if (PyObject_GetBuffer(keys.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) PyErr_Clear();
    const std::string_view format = buffer_.format == nullptr ? "" : buffer_.format;
    const char* const codes = type == KeyType::kUint64 ? "LQ" : type == KeyType::kInt64 ? "lq" : "il";
    if (format.size() != 1 || std::strchr(codes, format[0]) == nullptr || buffer_.itemsize != SizeOf(type)) {
      const ArrayView view("keys", keys, DtypeNamed(NameOf(type)), false);  // says what is wrong
      ThrowType("keys are of another type than the table's.");
    }
    shape_.assign(buffer_.shape, buffer_.shape + buffer_.ndim);
    size_ = Elements(shape_);
    if (type == KeyType::kInt32) {
      const auto* const narrow = static_cast<const int32_t*>(buffer_.buf);
      wide_.assign(narrow, narrow + size_);
    }
  }
  const int64_t* data() const {
    return wide_.empty() ? static_cast<const int64_t*>(buffer_.buf) : wide_.data();
  }
  int64_t size() const { return size_; }
  const Shape& shape() const { return shape_; }

 private:
  struct Buffer : Py_buffer {
    Buffer() : Py_buffer{} {}
    ~Buffer() {
      if (obj != nullptr) PyBuffer_Release(this);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
  };

  Buffer buffer_;
  Shape shape_;
  int64_t size_ = 0;
  std::vector<int64_t> wide_;
};

}  // namespace kvtable
