// A float as text in as few digits as tell it from its neighbours: what std::to_chars writes, in a third of the time.
//
// The method is Schubfach's (R. Giulietti, "The Schubfach way to render doubles", 2020): scale by a power of ten, so that
// the interval of what rounds to the number is between 1 and 10 wide; then it has at most one multiple of ten, which is
// the shortest if it is there, and otherwise one integer at the least, of which the nearest is taken. A float has so few
// bits that all of this is exact in 64 or 128 bits, without a table of rounded powers, for numbers of the size of
// embeddings.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>

namespace kvtable {
namespace shortest_float {

constexpr int kMantissaBits = 23, kBias = 150;
// Numbers are m x 2^e; others are left to std::to_chars. 4m x 10^19 fits 128 bits.
constexpr int kLeastExponent = -62, kMostExponent = -1;
constexpr int kMostPowerOfNarrow = 11;  // (4m + 2) x 10^11 fits 64 bits

constexpr uint64_t kPowers[20] = {1ull,
                                  10ull,
                                  100ull,
                                  1000ull,
                                  10000ull,
                                  100000ull,
                                  1000000ull,
                                  10000000ull,
                                  100000000ull,
                                  1000000000ull,
                                  10000000000ull,
                                  100000000000ull,
                                  1000000000000ull,
                                  10000000000000ull,
                                  100000000000000ull,
                                  1000000000000000ull,
                                  10000000000000000ull,
                                  100000000000000000ull,
                                  1000000000000000000ull,
                                  10000000000000000000ull};

// The digits of m x 2^e without trailing zeros, and the power of ten that they are multiplied by. `Wide` has room for
// 4m x 10^-k.
template <class Wide>
inline void Shorten(uint32_t m, int e, bool narrow, int k, uint32_t* digits, int* power) {
  const uint64_t ten = kPowers[-k];
  const int shift = 2 - e;
  // In units of 2^-shift: the number, and the ends of what rounds to it, which belong to it where m is even.
  const Wide at = static_cast<Wide>(4 * static_cast<uint64_t>(m)) * ten;
  const Wide open = m & 1;
  const Wide low = at - (narrow ? Wide{ten} : Wide{ten} * 2) + open, high = at + Wide{ten} * 2 - open;
  const auto below = static_cast<uint32_t>(at >> shift);
  const uint32_t tens = below / 10 * 10;
  const bool under = static_cast<Wide>(tens) << shift >= low;
  const bool over = static_cast<Wide>(tens + 10) << shift <= high;
  const Wide middle = static_cast<Wide>(below) << shift | Wide{1} << (shift - 1);
  const bool lower = static_cast<Wide>(below) << shift >= low;
  const bool upper = static_cast<Wide>(below + 1) << shift <= high;
  const bool nearer_above = (at > middle) | ((at == middle) & ((below & 1) != 0));
  // Which of them it is nobody foresees, so there is no branch.
  const uint32_t ones = below + static_cast<uint32_t>((!lower) | (upper & nearer_above));
  const uint32_t is_tens = static_cast<uint32_t>(under | over);
  uint32_t found = ones ^ ((ones ^ (tens / 10 + static_cast<uint32_t>(!under))) & (0 - is_tens));
  *power = k + static_cast<int>(is_tens);
  while (found % 10 == 0) found /= 10, ++*power;
  *digits = found;
}

inline int CountDigits(uint32_t number) {
  const int most = ((32 - __builtin_clz(number)) * 1233) >> 12;  // log10(2) x 4096
  return most + static_cast<int>(number >= kPowers[most]);
}

// Writes the `n` digits of a number below 10^9, and perhaps up to 8 bytes behind them.
inline void PutDigits(uint32_t number, int n, char* out) {
  const uint32_t top = number / 100000000, rest = number - top * 100000000;
  *out = static_cast<char>('0' + top);
  out += n == 9;
  // Eight digits at once, the first one in the lowest byte: halves, quarters, digits.
  const uint64_t halves = rest / 10000 | static_cast<uint64_t>(rest % 10000) << 32;
  const uint64_t hundreds = (halves * 10486 >> 20) & 0x7f0000007f;
  const uint64_t quarters = hundreds | (halves - 100 * hundreds) << 16;
  const uint64_t tens = (quarters * 103 >> 10) & 0x000f000f000f000f;
  uint64_t text = (tens | (quarters - 10 * tens) << 8) | 0x3030303030303030;
  text >>= 8 * (n < 8 ? 8 - n : 0);
  std::memcpy(out, &text, sizeof(text));
}

}  // namespace shortest_float

// Writes `value`, which is finite, as std::to_chars(out, out + 32, value) does; returns the end. There has to be room for 32
// characters.
inline char* WriteShortest(float value, char* out) {
  namespace s = shortest_float;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const int exponent = static_cast<int>(bits >> s::kMantissaBits & 0xff), e = exponent - s::kBias;
  if (exponent == 0 || e < s::kLeastExponent || e > s::kMostExponent)
    return std::to_chars(out, out + 32, value).ptr;
  const uint32_t m = (bits & ((1u << s::kMantissaBits) - 1)) | 1u << s::kMantissaBits;
  const bool narrow = m == 1u << s::kMantissaBits;  // the lower neighbour is half as far away
  // floor(log10(2^e)), or of three quarters of it: how wide the interval is.
  const int k = (e * 1262611 - (narrow ? 524031 : 0)) >> 22;
  uint32_t digits;
  int power;
  if (-k <= s::kMostPowerOfNarrow) {
    s::Shorten<uint64_t>(m, e, narrow, k, &digits, &power);
  } else {
    __extension__ using Wide = unsigned __int128;
    s::Shorten<Wide>(m, e, narrow, k, &digits, &power);
  }
  if (bits >> 31 != 0) *out++ = '-';
  const int n = s::CountDigits(digits), first = n - 1 + power;  // the power of ten of the first digit
  const int plain = first < 0 ? 1 - first + n : power >= 0 ? n + power : n + 1;
  const int scientific = n + (n > 1) + 4;
  if (plain > scientific) {
    s::PutDigits(digits, n, out + 1);
    out[0] = out[1];
    if (n > 1) {
      out[1] = '.';
      out += n + 1;
    } else {
      out += 1;
    }
    *out++ = 'e';
    *out++ = first < 0 ? '-' : '+';
    s::PutDigits(static_cast<uint32_t>(first < 0 ? -first : first), 2, out);
    return out + 2;
  }
  if (first < 0) {
    std::memcpy(out, "0.000000", 8);  // five zeros at most, or it were scientific
    s::PutDigits(digits, n, out + 1 - first);
    return out + 1 - first + n;
  }
  if (power >= 0) {
    s::PutDigits(digits, n, out);
    std::memset(out + n, '0', static_cast<size_t>(power));
    return out + n + power;
  }
  char text[24];
  s::PutDigits(digits, n, text);
  const int whole = first + 1;  // 7 at most
  std::memcpy(out, text, 8);
  out[whole] = '.';
  std::memcpy(out + whole + 1, text + whole, 9);
  return out + n + 1;
}

}  // namespace kvtable
