// Rows of float32 that are kept in 8 or 4 bits a number, byte by byte as docs/dialects/snapshot.md says: the smallest
// number of the row (the offset, float32), a scale (bfloat16), and a code for each number, which is the offset plus the
// scale times the code. That product is exact, so every way to compute the sum gives the same bits.
#pragma once

#include <cstdint>

namespace kvtable {

// How a row lies in memory. The numbers are those in a snapshot's file. kScaled is a float32 and an int8 for each
// number, to multiply with it: it is read, and not written any more.
enum class RowForm : uint8_t { kPlain = 0, kScaled = 1, kInt8 = 2, kInt4 = 3 };

inline constexpr int kRowForms = 4;

// The bytes of a row of `dim` numbers in any form but kPlain.
int64_t QuantizedRowBytes(RowForm form, int64_t dim);

// How far apart the smallest and the largest number of a row may be: the scale times any code is a float32 then.
inline constexpr float kWidestRow = 3.3e38f;

// Whether a row can be encoded: its numbers are finite, and no further apart than that.
bool CanQuantize(const void* row, int64_t dim);

// Rows need not be aligned. `form` is kInt8 or kInt4 to encode, any but kPlain to decode. Denormal numbers become zero. A row of one number alone is kept exactly.
using RowEncode = void (*)(const void* from, int64_t dim, void* to);
using RowDecode = void (*)(const void* from, int64_t dim, float* to);
RowEncode BestRowEncode(RowForm form);
RowDecode BestRowDecode(RowForm form);

// What rows lose by becoming others: of all numbers the largest and the sum of the absolute errors, of all rows the sum
// and the least of the cosines between a row and what became of it. A row with a number that is not finite, before or
// after, does not count. Two rows of zeros have cosine 1, and one of zeros and another have 0.
struct RowLoss {
  int64_t rows = 0;
  double largest_error = 0;
  double errors = 0;
  double cosines = 0;
  double least_cosine = 1;
};
RowLoss LossOfRows(const float* before, const float* after, int64_t rows, int64_t dim);

}  // namespace kvtable
