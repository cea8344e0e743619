// Rows of numbers as JSON, in as few digits as tell each number from all others of its type.
#pragma once

#include <cstdint>
#include <string>

namespace kvtable {

// Appends "[1.5,-2.0],[0.1,0.0]": the rows of `values` (rows, dim), without brackets around all of them. T is float,
// double, int8_t, int32_t, int64_t or bool.
//
// A float keeps its bits whether it is read as a float or, as most readers of JSON do, as a double that is
// rounded to a float. It has a '.' or an exponent, so that no reader takes it for an integer. JSON has no NaN
// and no infinity: they are the strings "NaN", "Infinity" and "-Infinity". Nothing depends on the locale.
template <class T>
void AppendJsonRows(const T* values, int64_t rows, int64_t dim, std::string* text);

// Appends "true,false": an element for each of `flags` (n).
void AppendJsonFlags(const uint8_t* flags, int64_t n, std::string* text);

}  // namespace kvtable
