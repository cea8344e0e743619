// kvtools._kvtable.initial_values and hash_key.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"
#include "kvtable/initializer.h"
#include "table_class.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

nb::object InitialValues(nb::handle keys, nb::handle value_dtype, int64_t dim, nb::handle initializer) {
  const nb::object dtype = nb::borrow(keys).attr("dtype");
  PyTable table(dtype, value_dtype, dim, initializer, nb::list(), 0, 0, "lru", 1, false, 1, 0, "seconds",
                nb::none(), nb::none(), nb::none());
  return table.Gather(keys, nb::str("initial"), nb::none(), nb::none(), nb::none());
}

}  // namespace

const char* const kInitializerDoc = R"(``initializer`` is None (zeros), a number, or a dict::

    {"kind": "constant", "value": 0.0}
    {"kind": "uniform", "low": 0.0, "high": 1.0, "seed": 0}
    {"kind": "normal", "mean": 0.0, "stddev": 1.0, "seed": 0}
    {"kind": "truncated_normal", "mean": 0.0, "stddev": 1.0, "seed": 0}
    {"kind": "rows", "rows": array}    # (rows, dim): key k takes row hash_key(k) mod rows
)";

void BindInitialValues(nb::module_& m) {
  m.def(
      "hash_key", [](uint64_t key) { return HashKey(key); }, "key"_a,
      R"(The 64-bit hash that places a key, given as its 64 bits (a negative key plus 2**64).

Example:
    >>> hash_key(0)
    0
)");
  static const std::string initial_values_doc = std::string(R"(The values that new keys would get in a table.

Args:
    keys: (...) of int64, int32 or uint64.
    value_dtype, dim, initializer: as for Table.

Returns:
    (..., dim) of value_dtype.

)") + kInitializerDoc + R"(
Example:
    >>> initial_values(np.array([1]), "float32", 2, 0.5)
    array([[0.5, 0.5]], dtype=float32)
)";
  m.def("initial_values", &InitialValues, "keys"_a, "value_dtype"_a, "dim"_a, "initializer"_a = nb::none(),
        initial_values_doc.c_str());
}

}  // namespace kvtable
