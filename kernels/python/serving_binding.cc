// The codecs of the lookup server: requests read, answers written.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "serving/json_lookup.h"
#include "serving/json_rows.h"
#include "serving/table_answer.h"
#include "snapshot_bindings.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

// Below this many bytes or numbers other threads gain nothing from the GIL.
constexpr int64_t kWorthReleasing = 4096;

std::string_view TextOf(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes BytesOf(const std::string& text) { return nb::bytes(text.data(), text.size()); }

template <class T>
nb::object ArrayOf(std::vector<T> elements) {
  auto owned = std::make_unique<std::vector<T>>(std::move(elements));
  std::vector<T>* const vector = owned.get();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(vector->data(), {vector->size()}, owner));
}

// Bytes that C++ writes, perhaps without the GIL.
class NewBytes {
 public:
  std::function<void*(int64_t)> allocator() {
    return [this](int64_t bytes) -> void* {
      object_ = nb::steal(PyBytes_FromStringAndSize(nullptr, bytes));
      if (!object_.is_valid()) throw nb::python_error();
      return PyBytes_AsString(object_.ptr());
    };
  }
  const nb::object& object() const { return object_; }

 private:
  nb::object object_;
};

// `verifies`: a single key may take a mebibyte from the disk.
void Unlocked(bool verifies, int64_t numbers, const std::function<void()>& work) {
  if (numbers < kWorthReleasing && !verifies) {
    work();
  } else {
    const nb::gil_scoped_release release;
    work();
  }
}

nb::object Answer(const SnapshotTable& table, const nb::bytes& body, bool binary_keys, bool binary_rows,
                  int missing, int64_t max_keys, int64_t max_numbers, RecentKeys* recent) {
  AnswerForm form;
  form.binary_keys = binary_keys;
  form.binary_rows = binary_rows;
  form.missing = static_cast<MissingKeys>(missing);
  form.max_keys = max_keys;
  form.max_numbers = max_numbers;
  form.recent = recent;
  NewBytes bytes;
  TableAnswer answer;
  try {
    const bool verifies = table.verifies_on_use();
    const auto unlocked = [=](int64_t numbers, const auto& work) { Unlocked(verifies, numbers, work); };
    if (!AnswerLookup(table, TextOf(body), form, bytes.allocator(), unlocked, &answer)) return nb::none();
  } catch (const Error&) {
    return nb::none();  // it will be met again, and then told
  }
  const nb::object rows = binary_rows ? bytes.object() : BytesOf(answer.json);
  return nb::make_tuple(rows, answer.keys, answer.rows, answer.missing);
}

nb::object FrameTables(const nb::bytes& body) {
  std::vector<FramePart> parts;
  uint32_t missing;
  if (!ReadFrame(TextOf(body), &parts, &missing)) return nb::none();
  nb::list names;
  for (const FramePart& part : parts) {
    nb::object name = nb::steal(
        PyUnicode_DecodeUTF8(part.table.data(), static_cast<Py_ssize_t>(part.table.size()), nullptr));
    if (!name.is_valid()) {
      PyErr_Clear();
      return nb::none();
    }
    names.append(name);
  }
  return names;
}

nb::object AnswerFrameOf(const nb::list& tables, const nb::bytes& body, int missing, int64_t max_keys,
                         int64_t max_numbers, uint64_t version) {
  std::vector<FramePart> parts;
  uint32_t said;
  if (!ReadFrame(TextOf(body), &parts, &said) || parts.size() != tables.size()) return nb::none();
  std::vector<const SnapshotTable*> of;
  for (nb::handle table : tables) of.push_back(nb::cast<const SnapshotTable*>(table));
  FrameLimits limits;
  limits.missing = static_cast<MissingKeys>(missing);
  limits.max_keys = max_keys;
  limits.max_numbers = max_numbers;
  limits.version = version;
  std::vector<int64_t> absent;
  NewBytes bytes;
  try {
    const bool verifies =
        std::any_of(of.begin(), of.end(), [](auto table) { return table->verifies_on_use(); });
    const auto unlocked = [=](int64_t numbers, const auto& work) { Unlocked(verifies, numbers, work); };
    if (!AnswerFrame(of, parts, said, limits, bytes.allocator(), unlocked, &absent)) return nb::none();
  } catch (const Error&) {
    return nb::none();  // it will be met again, and then told
  }
  nb::list counts;
  for (size_t i = 0; i < parts.size(); ++i) counts.append(nb::make_tuple(parts[i].keys, absent[i]));
  return nb::make_tuple(bytes.object(), counts);
}

nb::object ReadLookup(const nb::bytes& body, const std::string& key_dtype, int64_t max_keys) {
  const std::string_view text = TextOf(body);
  const KeyType key_type = KeyTypeOf(key_dtype);
  JsonLookup lookup;
  bool taken;
  if (static_cast<int64_t>(text.size()) > kWorthReleasing) {
    nb::gil_scoped_release release;
    taken = ReadJsonLookup(text, key_type, max_keys, &lookup);
  } else {
    taken = ReadJsonLookup(text, key_type, max_keys, &lookup);
  }
  if (!taken) return nb::none();
  const auto word = [](std::string_view w) -> nb::object {
    if (w.empty()) return nb::none();
    return nb::str(w.data(), w.size());
  };
  return nb::make_tuple(ArrayOf(std::move(lookup.keys)),
                        lookup.pooled ? ArrayOf(std::move(lookup.splits)) : nb::none(), word(lookup.combiner),
                        lookup.weighted ? ArrayOf(std::move(lookup.weights)) : nb::none(),
                        word(lookup.missing));
}

using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::string JsonRowsOf(const AnyRows& values) {
  const int64_t rows = static_cast<int64_t>(values.shape(0)), dim = static_cast<int64_t>(values.shape(1));
  std::string text;
  const auto write = [&] { AppendJsonRows(static_cast<const T*>(values.data()), rows, dim, &text); };
  if (rows * dim > kWorthReleasing) {
    nb::gil_scoped_release release;
    write();
  } else {
    write();
  }
  return text;
}

nb::bytes JsonRows(const AnyRows& values) {
  const auto type = values.dtype();
  if (type == nb::dtype<float>()) return BytesOf(JsonRowsOf<float>(values));
  if (type == nb::dtype<double>()) return BytesOf(JsonRowsOf<double>(values));
  if (type == nb::dtype<int8_t>()) return BytesOf(JsonRowsOf<int8_t>(values));
  if (type == nb::dtype<int32_t>()) return BytesOf(JsonRowsOf<int32_t>(values));
  if (type == nb::dtype<int64_t>()) return BytesOf(JsonRowsOf<int64_t>(values));
  if (type == nb::dtype<bool>()) return BytesOf(JsonRowsOf<bool>(values));
  ThrowType("values are of none of the dtypes float32, float64, int8, int32, int64 and bool.");
}

nb::bytes JsonFlags(const Flags& flags) {
  std::string text;
  AppendJsonFlags(reinterpret_cast<const uint8_t*>(flags.data()), static_cast<int64_t>(flags.shape(0)),
                  &text);
  return BytesOf(text);
}

}  // namespace

void BindServing(nb::module_& m) {
  m.def("answer", &Answer, "table"_a, "body"_a, "binary_keys"_a, "binary_rows"_a, "missing"_a, "max_keys"_a,
        "max_numbers"_a, "recent"_a.none() = nb::none(),
        "Answer a lookup of one table; `missing` is 0 for zeros, 1 for the default row, 2 for an error. "
        "`recent`\n"
        "gets keys of some of the lookups.\n\n"
        "Returns (body, keys, rows, missing keys), or None where kvtools.server.answer must do it.");
  m.def("frame_tables", &FrameTables, "body"_a,
        "Return the names of the tables of a frame, or None where kvtools.lookup_frame must read it.");
  m.def("answer_frame", &AnswerFrameOf, "tables"_a, "body"_a, "missing"_a, "max_keys"_a, "max_numbers"_a,
        "version"_a,
        "Answer a frame whose tables are `tables`, in order; otherwise as `answer`.\n\n"
        "Returns (body, [(keys, missing keys), ...]), or None where kvtools.server.answer must do it.");
  m.def("read_json_lookup", &ReadLookup, "body"_a, "key_dtype"_a, "max_keys"_a,
        "Read a lookup of one table from JSON.\n\n"
        "Returns (keys int64 [n] as 64-bit patterns, row_splits int64 [bags + 1] or None, combiner or None,\n"
        "weights float32 [n] or None, missing or None), or None where kvtools.server.request must read it.");
  m.def("json_rows", &JsonRows, "values"_a,
        "Write `values` [n, dim] (float32, float64, int8, int32, int64 or bool) as JSON: "
        "b'[1.5,2.0],[0.1,0.0]'.");
  m.def("json_flags", &JsonFlags, "flags"_a, "Write `flags`, bool [n], as JSON: b'true,false'.");
}

}  // namespace kvtable
