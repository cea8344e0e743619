// kvtools._row_text: rows of numbers as lines of text, without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "serving/csv_rows.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

NumberType TypeOf(const nb::dlpack::dtype& dtype) {
  if (dtype == nb::dtype<float>()) return NumberType::kFloat;
  if (dtype == nb::dtype<double>()) return NumberType::kDouble;
  if (dtype == nb::dtype<int8_t>()) return NumberType::kInt8;
  if (dtype == nb::dtype<int16_t>()) return NumberType::kInt16;
  if (dtype == nb::dtype<int32_t>()) return NumberType::kInt32;
  if (dtype == nb::dtype<int64_t>()) return NumberType::kInt64;
  if (dtype == nb::dtype<uint8_t>()) return NumberType::kUint8;
  if (dtype == nb::dtype<uint16_t>()) return NumberType::kUint16;
  if (dtype == nb::dtype<uint32_t>()) return NumberType::kUint32;
  if (dtype == nb::dtype<uint64_t>()) return NumberType::kUint64;
  if (dtype == nb::dtype<bool>()) return NumberType::kBool;
  throw nb::type_error("columns are of integers, bool, float32 or float64");
}

nb::bytes CsvLines(const nb::list& arrays, int64_t begin, int64_t end) {
  std::vector<CsvColumns> columns;
  std::vector<Array> held;
  for (nb::handle each : arrays) {
    held.push_back(nb::cast<Array>(each));
    const Array& array = held.back();
    const bool flat = array.ndim() == 1;
    if (!flat && array.ndim() != 2) throw nb::value_error("a column has one dimension or two");
    if (begin < 0 || end < begin || static_cast<size_t>(end) > array.shape(0))
      throw nb::value_error("a column has fewer rows");
    columns.push_back({TypeOf(array.dtype()), array.data(), flat ? 1 : static_cast<int64_t>(array.shape(1))});
  }
  if (columns.empty() || columns[0].width == 0) throw nb::value_error("a line begins with a number");
  // Kept by each thread: fresh memory is handed out page by page, which takes as long as the text.
  static thread_local std::vector<char> text;
  size_t size;
  {
    const nb::gil_scoped_release release;
    const size_t most = LongestCsvLine(columns) * static_cast<size_t>(end - begin);
    if (text.size() < most) text.resize(most);
    size = static_cast<size_t>(WriteCsvLines(columns, begin, end, text.data()) - text.data());
  }
  return nb::bytes(text.data(), size);
}

}  // namespace

NB_MODULE(_row_text, m) {
  m.doc() = "Rows of numbers as lines of text, without the GIL.";
  m.def("csv_lines", &CsvLines, "columns"_a, "begin"_a, "end"_a,
        R"(Write rows as comma-separated values, a line each.

Args:
    columns: arrays side by side, (n,) or (n, width) each, C-contiguous; integers, bool, float32 or float64.
    begin: the first row.
    end: the row behind the last one.

Returns:
    The lines, as bytes: numbers in as few digits as tell each from all others of its type, floats with a point or an
    exponent; NaN, Infinity and -Infinity; True and False.
)");
}

}  // namespace kvtable
