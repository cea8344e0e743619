// A number as text in as few digits as tell it from all others of its type, as JSON and CSV have it.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "serving/shortest_float.h"

namespace kvtable {

// Digits, sign, point, exponent and comma of any number, and the names of what is none.
constexpr size_t kMostCharacters = 32;

inline char* WriteText(const char* text, char* out) {
  const size_t length = std::strlen(text);
  std::memcpy(out, text, length);
  return out + length;
}

// The one float (but for its sign) whose shortest decimal, 7.038531e-26, is a double that rounds to its neighbour.
// tests/server/test_json_codec.py has more on that.
constexpr uint32_t kRoundsTwice = 0x15ae43fd;

// Writes an integer, or a float or double that is finite, with a '.' or an exponent, so that no reader takes it for an
// integer; returns the end. There has to be room for kMostCharacters. A float keeps its bits whether it is read as a
// float or as a double that is rounded to a float. Nothing depends on the locale.
template <class T>
inline char* WriteFinite(T value, char* out) {
  if constexpr (std::is_integral_v<T>) {
    return std::to_chars(out, out + kMostCharacters, value).ptr;
  } else {
    char* end;
    if constexpr (std::is_same_v<T, float>) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if ((bits & 0x7fffffff) == kRoundsTwice)
        return WriteText(value < 0 ? "-7.0385307e-26" : "7.0385307e-26", out);
      end = WriteShortest(value, out);
    } else {
      end = std::to_chars(out, out + kMostCharacters, value).ptr;
    }
    // What is no whole number has one of both.
    if (std::fabs(value) < T{1 << 30} && static_cast<T>(static_cast<int32_t>(value)) != value) return end;
    for (const char* c = out; c != end; ++c) {
      if (*c == '.' || *c == 'e') return end;
    }
    end[0] = '.';
    end[1] = '0';
    return end + 2;
  }
}

}  // namespace kvtable
