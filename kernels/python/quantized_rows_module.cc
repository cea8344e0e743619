// kvtools._quantized_rows: rows of float32 in 8 or 4 bits a number and back, and what rows lose.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "kvtable/quantized_rows.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

RowForm FormNamed(const std::string& name) {
  if (name == "int8") return RowForm::kInt8;
  if (name == "int4") return RowForm::kInt4;
  throw nb::value_error("rows are quantized as int8 or int4");
}

void Expect(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

size_t RowBytes(const std::string& dtype, int64_t dim) {
  return static_cast<size_t>(QuantizedRowBytes(FormNamed(dtype), dim));
}

void Encode(Floats values, const std::string& dtype, BytesOut rows) {
  const auto dim = static_cast<int64_t>(values.shape(1));
  const size_t width = RowBytes(dtype, dim), count = values.shape(0);
  Expect(dim > 0 && rows.shape(0) == count && rows.shape(1) == width,
         "rows must be [n, row_bytes] of values [n, dim]");
  const RowEncode encode = BestRowEncode(FormNamed(dtype));
  const nb::gil_scoped_release release;
  for (size_t row = 0; row < count; ++row) {
    encode(values.data() + row * static_cast<size_t>(dim), dim, rows.data() + row * width);
  }
}

void Decode(Bytes rows, const std::string& dtype, FloatsOut values) {
  const auto dim = static_cast<int64_t>(values.shape(1));
  const size_t width = RowBytes(dtype, dim), count = values.shape(0);
  Expect(dim > 0 && rows.shape(0) == count && rows.shape(1) == width,
         "rows must be [n, row_bytes] of values [n, dim]");
  const RowDecode decode = BestRowDecode(FormNamed(dtype));
  const nb::gil_scoped_release release;
  for (size_t row = 0; row < count; ++row) {
    decode(rows.data() + row * width, dim, values.data() + row * static_cast<size_t>(dim));
  }
}

int64_t FirstUnfit(Floats values) {
  const nb::gil_scoped_release release;
  for (size_t row = 0; row < values.shape(0); ++row) {
    if (!CanQuantize(values.data() + row * values.shape(1), static_cast<int64_t>(values.shape(1)))) {
      return static_cast<int64_t>(row);
    }
  }
  return -1;
}

std::tuple<int64_t, double, double, double, double> Loss(Floats before, Floats after) {
  Expect(before.shape(0) == after.shape(0) && before.shape(1) == after.shape(1),
         "rows before and after must be as many");
  RowLoss loss;
  {
    const nb::gil_scoped_release release;
    loss = LossOfRows(before.data(), after.data(), static_cast<int64_t>(before.shape(0)),
                      static_cast<int64_t>(before.shape(1)));
  }
  return {loss.rows, loss.largest_error, loss.errors, loss.cosines, loss.least_cosine};
}

}  // namespace

NB_MODULE(_quantized_rows, m) {
  m.doc() = "Rows of float32 in 8 or 4 bits a number and back, without the GIL.";
  m.def("row_bytes", &RowBytes, "dtype"_a, "dim"_a, "The bytes of a row of `dim` numbers as int8 or int4.");
  m.def("first_unfit", &FirstUnfit, "values"_a,
        "The first row of `values` (n, dim) that cannot be encoded: it has NaN or infinity, or numbers more "
        "than 3.3e38 "
        "apart; -1 if there is none.");
  m.def("encode", &Encode, "values"_a, "dtype"_a, "rows"_a,
        "Encode `values` (n, dim) of float32 as int8 or int4 into `rows` (n, row_bytes) of uint8.");
  m.def("decode", &Decode, "rows"_a, "dtype"_a, "values"_a, "The way back.");
  m.def("loss", &Loss, "before"_a, "after"_a,
        R"(Compare rows (n, dim) of float32 with what became of them.

Returns:
    How many rows are finite before and after; of those the largest and the sum of the absolute errors, the sum of the
    cosines between a row and what became of it, and the least of them.
)");
}

}  // namespace kvtable
