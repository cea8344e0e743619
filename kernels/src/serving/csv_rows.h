// Rows of numbers as lines of comma-separated values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtable {

enum class NumberType {
  kFloat,
  kDouble,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kBool
};

// Columns side by side of one type: `data` (rows, width).
struct CsvColumns {
  NumberType type;
  const void* data;
  int64_t width;
};

// The most bytes that a line takes.
size_t LongestCsvLine(const std::vector<CsvColumns>& columns);

// Writes lines `begin` to `end`, "5,0.1,-2.0\n", each number as `WriteFinite` does; what is none is NaN, Infinity or
// -Infinity, and a bool is True or False. Returns the end of the text; `out` has room for the longest lines.
char* WriteCsvLines(const std::vector<CsvColumns>& columns, int64_t begin, int64_t end, char* out);

}  // namespace kvtable
