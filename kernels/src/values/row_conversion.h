// Rows of 16-bit elements to float32 and back, by the best instructions that the CPU has.
#pragma once

#include <cstdint>

#include "kvtable/types.h"

namespace kvtable {

struct RowConversion {
  void (*load)(const void* from, int64_t n, float* to);        // to = from
  void (*accumulate)(const void* from, int64_t n, float* to);  // to += from
  void (*store)(const float* from, int64_t n, void* to);       // rounds to nearest, ties to even
  // Rounds up with the probability that makes the mean exact, by 32 random bits for each element: those of
  // element j are half j % 2 (the low half first) of RandomWord(stream, first_word + j / 2). What is exact
  // stays as it is; what is beyond the largest finite number rounds to nearest.
  void (*store_stochastically)(const float* from, int64_t n, uint64_t stream, uint64_t first_word, void* to);
};

// `type` is kFloat16 or kBFloat16.
RowConversion BestRowConversion(ValueType type);

// The `load` of that. Throws Error(kInvalidArgument) for other types.
decltype(RowConversion::load) WidenRow(ValueType type);

}  // namespace kvtable
