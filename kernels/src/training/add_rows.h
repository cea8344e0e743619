// Sums of rows that lie anywhere, by the functions that the CPU at hand runs fastest.
#pragma once

#include <cstdint>

#include "kvtable/types.h"

namespace kvtable {

// sum = rows[0] + rows[1] + ..., one after the other, on top of zeros where `fresh`, else of what is in `sum`. Each row
// times its weight, where there are weights. `sum` (dim) and `weights` (n) are double for rows of double, else float.
using AddRows = void (*)(const char* const* rows, const void* weights, int64_t n, int64_t dim, bool fresh,
                         void* sum);

AddRows BestAddRows(ValueType type, bool weighted);

// Rows to be summed: indices[0] to indices[n - 1]. While one is, `ahead` further ones are asked for, up to that of
// indices[last], which may lie behind them or be the one before them.
struct RowIndices {
  const uint32_t* indices;
  int64_t n;
  int64_t ahead;
  int64_t last;
};

// sum += row indices[0] of `rows` (any number, dim), + row indices[1] + ..., one after the other. float or double.
using AddIndexedRows = void (*)(const void* rows, const RowIndices& indices, int64_t dim, void* sum);

AddIndexedRows BestAddIndexedRows(bool is_double);

// For each of `numbers`, from 0 to n - 1: adds `row` to that row of `sums` (rows, dim), or, where the number is *begun,
// begins that row with it, and counts *begun up. float or double.
using AddToRows = void (*)(const void* row, const uint32_t* numbers, int64_t n, int64_t dim, uint32_t* begun,
                           void* sums);

AddToRows BestAddToRows(bool is_double);

// Adds `row` (dim) to `sums` from each of `places` on, one after the other. float or double.
using AddToPlaces = void (*)(const void* row, const int64_t* places, int64_t n, int64_t dim, void* sums);

AddToPlaces BestAddToPlaces(bool is_double);

}  // namespace kvtable
