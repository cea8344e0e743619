// Whether a row passes a test, and its rank. One source for CPU and GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"
#include "kvtable/expiry.h"
#include "values/elements.h"

namespace kvtable {

// The sum of the squares of a value's elements, in eight sums side by side: the same on every processor.
template <class T>
KVTABLE_HOST_DEVICE inline double SumOfSquares(const char* value, int64_t dim) {
  const T* const elements = reinterpret_cast<const T*>(value);
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    KVTABLE_UNROLL
    for (int lane = 0; lane < 8; ++lane) {
      const double x = static_cast<double>(Element<T>::Load(elements[i + lane]));
      sums[lane] += x * x;
    }
  }
  for (int lane = 0; i < dim; ++i, ++lane) {
    const double x = static_cast<double>(Element<T>::Load(elements[i]));
    sums[lane] += x * x;
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Numbers of 0 and more, in their order.
KVTABLE_HOST_DEVICE inline uint64_t OrderedBits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return x == x ? bits : UINT64_MAX;
}

// `squares()` is the SumOfSquares of the row, asked for where it counts.
template <class Squares>
KVTABLE_HOST_DEVICE inline RowRank RankOf(RankBy by, uint64_t key, uint32_t frequency, uint32_t version,
                                          const Squares& squares) {
  if (by == RankBy::kNorm) return {OrderedBits(squares()), key};
  const bool by_frequency = by == RankBy::kFrequency;
  const uint64_t high = by_frequency ? frequency : version;
  return {high << 32 | (by_frequency ? version : frequency), key};
}

template <class Squares>
KVTABLE_HOST_DEVICE inline bool Goes(const RowTest& test, uint64_t key, uint32_t frequency, uint32_t version,
                                     const Squares& squares) {
  if (version < test.written_before || frequency < test.least_frequency) return true;
  if (test.least_norm > 0 && squares() < test.least_norm * test.least_norm) return true;
  if (test.least_rank.measure == 0 && test.least_rank.key == 0) return false;
  const RowRank rank = RankOf(test.by, key, frequency, version, squares);
  return rank.measure != test.least_rank.measure ? rank.measure < test.least_rank.measure
                                                 : rank.key < test.least_rank.key;
}

// The value of a rank's digit, or -1 where those before it are not the ones found.
KVTABLE_HOST_DEVICE inline int DigitOf(const RankDigit& digit, const RowRank& rank) {
  const bool of_key = digit.digit >= RankDigit::kDigits / 2;
  if (of_key && rank.measure != digit.found.measure) return -1;
  const uint64_t word = of_key ? rank.key : rank.measure;
  const uint64_t found = of_key ? digit.found.key : digit.found.measure;
  const int shift = 48 - digit.digit % (RankDigit::kDigits / 2) * 16;
  if (shift < 48 && (word ^ found) >> (shift + 16) != 0) return -1;
  return static_cast<int>(word >> shift & 0xffff);
}

}  // namespace kvtable
