// What Python passes to the modules: dtypes, NumPy arrays, initializers and slots; and what errors it gets.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvtable/eviction.h"
#include "kvtable/initializer.h"
#include "kvtable/optimizer.h"
#include "kvtable/table.h"
#include "kvtable/types.h"

namespace nb = nanobind;

namespace kvtable {

inline std::string TextOf(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

[[noreturn]] inline void ThrowType(const std::string& message) { throw nb::type_error(message.c_str()); }
[[noreturn]] inline void ThrowValue(const std::string& message) { throw nb::value_error(message.c_str()); }

// What an error of the engine is in Python. Modules in one process share such translators: so that it does
// not matter which was imported last, all register this one.
inline void TranslateError(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    PyObject* const type = e.code() == ErrorCode::kInvalidArgument     ? PyExc_ValueError
                           : e.code() == ErrorCode::kResourceExhausted ? PyExc_MemoryError
                                                                       : PyExc_RuntimeError;
    PyErr_SetString(type, e.what());
  }
}

// ---- Dtypes

inline nb::object DtypeNamed(const std::string& name) {
  if (name == "bfloat16") {
    return nb::module_::import_("numpy").attr("dtype")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
  }
  return nb::module_::import_("numpy").attr("dtype")(name);
}

// The name of anything that names a dtype: "float32", np.float32, np.dtype("float32"), ml_dtypes.bfloat16.
inline std::string NameOfDtype(nb::handle dtype) {
  if (nb::isinstance<nb::str>(dtype)) {
    const std::string text = TextOf(dtype);
    if (text == "bfloat16") return text;
  }
  return TextOf(nb::module_::import_("numpy").attr("dtype")(dtype).attr("name"));
}

inline KeyType KeyTypeOf(const std::string& name) {
  if (name == "int64") return KeyType::kInt64;
  if (name == "int32") return KeyType::kInt32;
  if (name == "uint64") return KeyType::kUint64;
  ThrowValue("key_dtype is " + name + "; expected int64, int32 or uint64.");
}

inline ValueType ValueTypeOf(const std::string& name) {
  if (name == "float32") return ValueType::kFloat32;
  if (name == "float16") return ValueType::kFloat16;
  if (name == "bfloat16") return ValueType::kBFloat16;
  if (name == "float64") return ValueType::kFloat64;
  ThrowValue("value_dtype is " + name + "; expected float32, float16, bfloat16 or float64.");
}

inline constexpr std::pair<const char*, Eviction> kEvictions[] = {{"lru", Eviction::kLru},
                                                                  {"lfu", Eviction::kLfu},
                                                                  {"custom", Eviction::kCustom},
                                                                  {"epoch_lru", Eviction::kEpochLru},
                                                                  {"epoch_lfu", Eviction::kEpochLfu}};

inline Eviction EvictionOf(const std::string& name) {
  for (const auto& [known, eviction] : kEvictions) {
    if (name == known) return eviction;
  }
  ThrowValue("eviction is '" + name + "'; expected 'lru', 'lfu', 'custom', 'epoch_lru' or 'epoch_lfu'.");
}

inline std::string NameOf(Eviction eviction) {
  for (const auto& [name, known] : kEvictions) {
    if (eviction == known) return name;
  }
  return "";
}

// ---- Arrays

using Shape = std::vector<int64_t>;

inline std::string TextOf(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

inline int64_t Elements(const Shape& shape) {
  int64_t elements = 1;
  for (int64_t n : shape) elements *= n;
  return elements;
}

inline nb::tuple TupleOf(const Shape& shape) {
  nb::list list;
  for (int64_t n : shape) list.append(n);
  return nb::tuple(list);
}

// The memory of a C-contiguous NumPy array of exactly the given dtype, kept alive and in place.
class ArrayView {
 public:
  ArrayView(const char* what, nb::handle array, const nb::object& dtype, bool writable) {
    if (!nb::hasattr(array, "__array_interface__") || !nb::hasattr(array, "dtype")) {
      ThrowType(std::string(what) + " is a " + TextOf(array.type().attr("__name__")) +
                "; expected a NumPy array of dtype " + TextOf(dtype.attr("name")) + ".");
    }
    if (!array.attr("dtype").equal(dtype)) {
      ThrowType(std::string(what) + " has dtype " + TextOf(array.attr("dtype")) + "; expected " +
                TextOf(dtype.attr("name")) + ".");
    }
    // NumPy gives no buffer of a dtype that is not its own, so bfloat16 passes as its bits.
    nb::object viewed = nb::borrow(array);
    if (TextOf(dtype.attr("name")) == "bfloat16") {
      if (nb::cast<int>(array.attr("ndim")) == 0)
        viewed = viewed.attr("reshape")(1);
      else
        for (nb::handle n : array.attr("shape")) shape_.push_back(nb::cast<int64_t>(n));
      scalar_ = shape_.empty();
      viewed = viewed.attr("view")("uint16");
    }
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(viewed.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      ThrowValue(std::string(what) +
                 (writable ? " must be a C-contiguous, writable array."
                           : " must be a C-contiguous array. Pass numpy.ascontiguousarray of it."));
    }
    if (shape_.empty() && !scalar_) shape_.assign(buffer_.shape, buffer_.shape + buffer_.ndim);
  }
  ~ArrayView() { PyBuffer_Release(&buffer_); }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  void* data() const { return buffer_.buf; }
  const Shape& shape() const { return shape_; }
  int64_t size() const { return Elements(shape_); }

  void ExpectShape(const char* what, const Shape& expected) const {
    if (shape_ != expected) {
      ThrowValue(std::string(what) + " has shape " + TextOf(shape_) + "; expected " + TextOf(expected) + ".");
    }
  }

 private:
  Py_buffer buffer_ = {};
  Shape shape_;
  bool scalar_ = false;
};

inline Shape WithWidth(Shape shape, int64_t width) {
  shape.push_back(width);
  return shape;
}

// `out` where it was given, else a new array.
inline nb::object OutputArray(const nb::object& out, const Shape& shape, const nb::object& dtype) {
  if (!out.is_none()) return out;
  return nb::module_::import_("numpy").attr("empty")(TupleOf(shape), dtype);
}

// ---- Initializers and slots

// None, a number, or a dict {"kind": ..., ...}.
inline Initializer InitializerOf(nb::handle spec, ValueType value_type, const nb::object& value_dtype,
                                 int64_t dim) {
  (void)value_type;
  Initializer init;
  if (spec.is_none()) return init;
  if (PyFloat_Check(spec.ptr()) || PyLong_Check(spec.ptr())) {
    init.a = nb::cast<double>(spec);
    return init;
  }
  if (!nb::isinstance<nb::dict>(spec)) {
    ThrowType("initializer is a " + TextOf(spec.type().attr("__name__")) +
              "; expected None, a number or a dict such as {'kind': 'normal', 'mean': 0.0, 'stddev': 0.01, "
              "'seed': 1}.");
  }
  const nb::dict dict = nb::borrow<nb::dict>(spec);
  const auto number = [&](const char* name, double otherwise) {
    return dict.contains(name) ? nb::cast<double>(dict[name]) : otherwise;
  };
  const auto allow = [&](const std::vector<std::string>& names) {
    for (auto [key, value] : dict) {
      const std::string name = TextOf(key);
      bool known = name == "kind";
      for (const std::string& each : names) known = known || name == each;
      if (!known) {
        std::string expected = "kind";
        for (const std::string& each : names) expected += ", " + each;
        ThrowValue("initializer has an entry '" + name + "'; expected " + expected + ".");
      }
    }
  };
  if (dict.contains("seed")) {
    // Any Python int, taken modulo 2**64.
    init.seed = nb::cast<uint64_t>(nb::int_(dict["seed"]) & nb::int_(UINT64_MAX));
  }
  const std::string kind = dict.contains("kind") ? TextOf(dict["kind"]) : "";
  if (kind == "constant") {
    allow({"value"});
    init.a = number("value", 0.0);
  } else if (kind == "uniform") {
    allow({"low", "high", "seed"});
    init.kind = Initializer::Kind::kUniform;
    init.a = number("low", 0.0);
    init.b = number("high", 1.0);
  } else if (kind == "normal" || kind == "truncated_normal") {
    allow({"mean", "stddev", "seed"});
    init.kind = kind == "normal" ? Initializer::Kind::kNormal : Initializer::Kind::kTruncatedNormal;
    init.a = number("mean", 0.0);
    init.b = number("stddev", 1.0);
  } else if (kind == "rows") {
    allow({"rows"});
    init.kind = Initializer::Kind::kRows;
    if (!dict.contains("rows"))
      ThrowValue("initializer of kind 'rows' has no 'rows'; expected an array (rows, dim).");
    const ArrayView rows("initializer['rows']", dict["rows"], value_dtype, false);
    if (rows.shape().size() != 2 || rows.shape()[1] != dim) {
      ThrowValue("initializer['rows'] has shape " + TextOf(rows.shape()) + "; expected (rows, " +
                 std::to_string(dim) + ").");
    }
    const char* const bytes = static_cast<const char*>(rows.data());
    init.num_rows = rows.shape()[0];
    init.rows = std::make_shared<std::vector<char>>(bytes, bytes + rows.size() * SizeOf(value_type));
  } else {
    ThrowValue("initializer has kind '" + kind +
               "'; expected 'constant', 'uniform', 'normal', 'truncated_normal' or 'rows'.");
  }
  return init;
}

inline nb::dict DictOf(const Initializer& init, ValueType value_type, const nb::object& value_dtype,
                       int64_t dim) {
  nb::dict dict;
  switch (init.kind) {
    case Initializer::Kind::kConstant:
      dict["kind"] = "constant";
      dict["value"] = init.a;
      return dict;
    case Initializer::Kind::kUniform:
      dict["kind"] = "uniform";
      dict["low"] = init.a;
      dict["high"] = init.b;
      break;
    case Initializer::Kind::kNormal:
    case Initializer::Kind::kTruncatedNormal:
      dict["kind"] = init.kind == Initializer::Kind::kNormal ? "normal" : "truncated_normal";
      dict["mean"] = init.a;
      dict["stddev"] = init.b;
      break;
    case Initializer::Kind::kRows: {
      dict["kind"] = "rows";
      const nb::object rows = OutputArray(nb::none(), {init.num_rows, dim}, value_dtype);
      const ArrayView view("rows", rows, value_dtype, true);
      std::memcpy(view.data(), init.rows->data(),
                  static_cast<size_t>(init.num_rows * dim * SizeOf(value_type)));
      dict["rows"] = rows;
      return dict;
    }
  }
  dict["seed"] = init.seed;
  return dict;
}

// A sequence of (name, width, "constant" | "copy_value", constant); the last two may be left out.
inline std::vector<SlotSpec> SlotsOf(nb::handle specs) {
  std::vector<SlotSpec> slots;
  for (nb::handle item : specs) {
    const nb::tuple spec = nb::tuple(nb::borrow(item));
    if (spec.size() < 2 || spec.size() > 4) {
      ThrowValue("A slot is " + TextOf(nb::repr(item)) +
                 "; expected (name, width), (name, width, init) or (name, width, init, constant).");
    }
    SlotSpec slot;
    slot.name = nb::cast<std::string>(spec[0]);
    slot.width = nb::cast<int64_t>(spec[1]);
    const std::string init = spec.size() > 2 ? nb::cast<std::string>(spec[2]) : "constant";
    if (init != "constant" && init != "copy_value") {
      ThrowValue("Slot '" + slot.name + "' has init '" + init + "'; expected 'constant' or 'copy_value'.");
    }
    slot.init = init == "constant" ? SlotSpec::Init::kConstant : SlotSpec::Init::kCopyValue;
    slot.constant = spec.size() > 3 ? nb::cast<double>(spec[3]) : 0.0;
    slots.push_back(std::move(slot));
  }
  return slots;
}

// As SlotsOf takes them, each whole.
inline nb::list ListOf(const std::vector<SlotSpec>& slots) {
  nb::list list;
  for (const SlotSpec& slot : slots) {
    list.append(nb::make_tuple(slot.name, slot.width,
                               slot.init == SlotSpec::Init::kConstant ? "constant" : "copy_value",
                               slot.constant));
  }
  return list;
}

// ---- Optimizers

inline Update UpdateOf(const std::string& optimizer, const nb::dict& hyperparameters) {
  std::vector<std::pair<std::string, double>> named;
  for (auto [name, value] : hyperparameters) {
    named.emplace_back(nb::cast<std::string>(name), nb::cast<double>(nb::float_(value)));
  }
  return MakeUpdate(optimizer, named);
}

}  // namespace kvtable
