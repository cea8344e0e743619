#include "serving/json_rows.h"

#include <cmath>
#include <type_traits>

#include "serving/number_text.h"

namespace kvtable {
namespace {

// Rows are written into a buffer of this many numbers, then appended.
constexpr int64_t kNumbersAtOnce = 256;

template <class T>
char* WriteNumber(T value, char* out) {
  if constexpr (std::is_same_v<T, bool>) {
    return WriteText(value ? "true" : "false", out);
  } else if constexpr (std::is_integral_v<T>) {
    return WriteFinite(value, out);
  } else {
    if (std::isfinite(value)) return WriteFinite(value, out);
    return WriteText(std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"", out);
  }
}

}  // namespace

template <class T>
void AppendJsonRows(const T* values, int64_t rows, int64_t dim, std::string* text) {
  char buffer[(kNumbersAtOnce + 1) * kMostCharacters];
  for (int64_t row = 0; row < rows; ++row) {
    text->append(row > 0 ? ",[" : "[");
    for (int64_t begin = 0; begin < dim; begin += kNumbersAtOnce) {
      const int64_t end = begin + kNumbersAtOnce < dim ? begin + kNumbersAtOnce : dim;
      char* out = buffer;
      for (int64_t i = begin; i < end; ++i) {
        if (i > 0) *out++ = ',';
        out = WriteNumber(values[row * dim + i], out);
      }
      text->append(buffer, static_cast<size_t>(out - buffer));
    }
    text->push_back(']');
  }
}

template void AppendJsonRows(const float*, int64_t, int64_t, std::string*);
template void AppendJsonRows(const double*, int64_t, int64_t, std::string*);
template void AppendJsonRows(const int8_t*, int64_t, int64_t, std::string*);
template void AppendJsonRows(const int32_t*, int64_t, int64_t, std::string*);
template void AppendJsonRows(const int64_t*, int64_t, int64_t, std::string*);
template void AppendJsonRows(const bool*, int64_t, int64_t, std::string*);

void AppendJsonFlags(const uint8_t* flags, int64_t n, std::string* text) {
  for (int64_t i = 0; i < n; ++i) {
    if (i > 0) text->push_back(',');
    text->append(flags[i] ? "true" : "false");
  }
}

}  // namespace kvtable
