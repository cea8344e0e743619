#include "serving/csv_rows.h"

#include <cmath>
#include <type_traits>

#include "serving/number_text.h"

namespace kvtable {
namespace {

template <class T>
char* WriteNumbers(const void* data, int64_t row, int64_t width, char* out) {
  const T* const numbers = static_cast<const T*>(data) + row * width;
  for (int64_t i = 0; i < width; ++i) {
    const T value = numbers[i];
    if constexpr (std::is_same_v<T, bool>) {
      out = WriteText(value ? "True" : "False", out);
    } else if constexpr (std::is_floating_point_v<T>) {
      if (std::isfinite(value)) {
        out = WriteFinite(value, out);
      } else {
        out = WriteText(std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity", out);
      }
    } else {
      out = WriteFinite(value, out);
    }
    *out++ = ',';
  }
  return out;
}

using Writer = char* (*)(const void*, int64_t, int64_t, char*);

Writer WriterOf(NumberType type) {
  switch (type) {
    case NumberType::kFloat:
      return WriteNumbers<float>;
    case NumberType::kDouble:
      return WriteNumbers<double>;
    case NumberType::kInt8:
      return WriteNumbers<int8_t>;
    case NumberType::kInt16:
      return WriteNumbers<int16_t>;
    case NumberType::kInt32:
      return WriteNumbers<int32_t>;
    case NumberType::kInt64:
      return WriteNumbers<int64_t>;
    case NumberType::kUint8:
      return WriteNumbers<uint8_t>;
    case NumberType::kUint16:
      return WriteNumbers<uint16_t>;
    case NumberType::kUint32:
      return WriteNumbers<uint32_t>;
    case NumberType::kUint64:
      return WriteNumbers<uint64_t>;
    case NumberType::kBool:
      break;
  }
  return WriteNumbers<bool>;
}

}  // namespace

size_t LongestCsvLine(const std::vector<CsvColumns>& columns) {
  size_t numbers = 1;
  for (const CsvColumns& column : columns) numbers += static_cast<size_t>(column.width);
  return numbers * kMostCharacters;
}

char* WriteCsvLines(const std::vector<CsvColumns>& columns, int64_t begin, int64_t end, char* out) {
  std::vector<Writer> writers;
  for (const CsvColumns& column : columns) writers.push_back(WriterOf(column.type));
  for (int64_t row = begin; row < end; ++row) {
    for (size_t i = 0; i < columns.size(); ++i) out = writers[i](columns[i].data, row, columns[i].width, out);
    out[-1] = '\n';
  }
  return out;
}

}  // namespace kvtable
