#include "serving/json_rows.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "serving/shortest_float.h"

namespace kvtable {
namespace {

// Digits, sign, point, exponent and comma of any number, and the names of what is none.
constexpr size_t kMostCharacters = 32;
// Rows are written into a buffer of this many numbers, then appended.
constexpr int64_t kNumbersAtOnce = 256;

char* WriteText(const char* text, char* out) {
  const size_t length = std::strlen(text);
  std::memcpy(out, text, length);
  return out + length;
}

// The one float (but for its sign) whose shortest decimal, 7.038531e-26, is a double that rounds to its neighbour.
// tests/server/test_json_codec.py has more on that.
constexpr uint32_t kRoundsTwice = 0x15ae43fd;

template <class T>
char* WriteNumber(T value, char* out) {
  if constexpr (std::is_same_v<T, bool>) {
    return WriteText(value ? "true" : "false", out);
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_chars(out, out + kMostCharacters, static_cast<int64_t>(value)).ptr;
  } else {
    if (!std::isfinite(value)) {
      return WriteText(std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"", out);
    }
    if constexpr (std::is_same_v<T, float>) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if ((bits & 0x7fffffff) == kRoundsTwice)
        return WriteText(value < 0 ? "-7.0385307e-26" : "7.0385307e-26", out);
    }
    char* end;
    if constexpr (std::is_same_v<T, float>) {
      end = WriteShortest(value, out);
    } else {
      end = std::to_chars(out, out + kMostCharacters, value).ptr;
    }
    for (const char* c = out; c != end; ++c) {
      if (*c == '.' || *c == 'e') return end;
    }
    end[0] = '.';
    end[1] = '0';
    return end + 2;
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
