// kvtools._row_stats: what statistics need of each row, in one pass over the numbers and without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

// Side by side, so that the compiler uses whole vectors without reordering anybody's additions.
constexpr size_t kLanes = 16;

struct Lanes {
  uint32_t top[kLanes];  // the largest bits, without the sign
  uint32_t low[kLanes];  // the smallest bits less one, which makes zero the largest of all
  float squares[kLanes];
  float sum[kLanes];
};

inline void Add(const float* numbers, size_t count, Lanes* lanes) {
  for (size_t lane = 0; lane < count; ++lane) {
    uint32_t bits;
    std::memcpy(&bits, numbers + lane, sizeof(bits));
    bits <<= 1;
    lanes->top[lane] = std::max(lanes->top[lane], bits);
    lanes->low[lane] = std::min(lanes->low[lane], bits - 1);
    lanes->squares[lane] += numbers[lane] * numbers[lane];
    lanes->sum[lane] += numbers[lane];
  }
}

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void Count(const float* values, size_t rows, size_t width, float* largest, float* squares, double* total,
           uint32_t* low) {
  for (size_t row = 0; row < rows; ++row, values += width) {
    Lanes lanes{};
    std::fill(lanes.low, lanes.low + kLanes, ~uint32_t{0});
    size_t column = 0;
    for (; column + kLanes <= width; column += kLanes) Add(values + column, kLanes, &lanes);
    Add(values + column, width - column, &lanes);
    uint32_t top = 0;
    float square = 0, sum = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      top = std::max(top, lanes.top[lane]);
      *low = std::min(*low, lanes.low[lane]);
      square += lanes.squares[lane];
      sum += lanes.sum[lane];
    }
    top >>= 1;
    std::memcpy(largest + row, &top, sizeof(top));
    squares[row] = square;
    *total += sum;
  }
}

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Column = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::pair<double, uint32_t> RowStats(Rows values, Column largest, Column squares) {
  if (largest.shape(0) != values.shape(0) || squares.shape(0) != values.shape(0)) {
    throw nb::value_error("largest and squares must have an element for each row of values");
  }
  double total = 0;
  uint32_t low = ~uint32_t{0};
  {
    nb::gil_scoped_release release;
    Count(values.data(), values.shape(0), values.shape(1), largest.data(), squares.data(), &total, &low);
  }
  return {total, low};
}

}  // namespace

NB_MODULE(_row_stats, m) {
  m.doc() = "What statistics need of each row, in one pass and without the GIL.";
  m.def("row_stats", &RowStats, "values"_a, "largest"_a, "squares"_a,
        R"(Measure rows of float32.

Args:
    values: (n, width).
    largest: (n,) of float32, becomes the largest absolute value of each row; a NaN where the row has one, else an
        infinity where it has one.
    squares: (n,) of float32, becomes the sum of the squares of each row.

Returns:
    The sum of all numbers, and the smallest of the numbers' bits shifted left by one, less one, without zeros: below
    2**24 - 1 where a number is denormal.
)");
}

}  // namespace kvtable
