// One step of an optimizer made ready to run over rows: the rule, its constants, and the function that the
// CPU at hand runs fastest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvtable/optimizer.h"
#include "memory/copy_rows.h"
#include "training/add_rows.h"
#include "values/row_conversion.h"

namespace kvtable {

// Immutable: any number of threads may update rows with it at once, each with its own scratch.
class RowUpdater {
 public:
  // Throws Error(kInvalidArgument) as CheckUpdate does.
  RowUpdater(const Update& update, ValueType value_type, int64_t dim);

  // Updates one row: columns[0] is the value, columns[i + 1] slot i. `gradient` is of the compute type,
  // (dim). `key` chooses the bits of stochastic rounding. Returns whether the rule has zeroed the row.
  bool operator()(void* const* columns, const void* gradient, uint64_t key, void* scratch) const {
    if (columns_ > 0) return UpdateConverted(columns, gradient, key, scratch);
    return function_(*this, columns, gradient);
  }

  // Bytes of scratch that a thread needs, aligned for float.
  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  template <class Rule>
  friend struct RuleFunctions;
  using Function = bool (*)(const RowUpdater&, void* const* columns, const void* gradient);
  static constexpr size_t kMostConstantBytes = 256;
  static constexpr size_t kMostColumns = 8;

  // 16-bit columns: to float32 in scratch, updated there, and back.
  bool UpdateConverted(void* const* columns, const void* gradient, uint64_t key, void* scratch) const;

  Function function_ = nullptr;
  int64_t dim_;
  double decay_ = 0;  // learning rate * weight decay
  bool stochastic_rounding_;
  uint64_t seed_;
  size_t columns_ = 0;  // of a row; zero where they need no conversion
  RowConversion conversion_ = {};
  size_t scratch_bytes_ = 0;
  alignas(64) unsigned char constants_[kMostConstantBytes];
};

// Gradient rows, of the value type unless the update says that they are of float32, summed in the compute type.
class GradientSum {
 public:
  GradientSum(const Update& update, ValueType value_type, int64_t dim);

  // The sum of rows indices[begin] to indices[end - 1] of `rows`, one after the other: in `sum` (of bytes()), or where
  // it lies already. Asks memory for rows of the next of the `n` indices, which are wanted next.
  const void* Of(const char* rows, const uint32_t* indices, uint32_t n, uint32_t begin, uint32_t end,
                 void* sum) const {
    const char* const first = rows + int64_t{indices[begin]} * row_bytes_;
    PrefetchRow<kAnyBytes>(rows + int64_t{indices[std::min(begin + ahead_, n - 1)]} * row_bytes_, row_bytes_);
    if (end - begin == 1 && same_type_) return first;
    Set(sum, first);
    Add(rows, indices + begin + 1, end - begin - 1, n - begin - 2, sum);
    return sum;
  }
  // Asks for the rows that the first calls of Of want.
  void Ask(const char* rows, const uint32_t* indices, uint32_t n) const {
    for (uint32_t i = 0; i < std::min(ahead_, n); ++i) {
      PrefetchRow<kAnyBytes>(rows + int64_t{indices[i]} * row_bytes_, row_bytes_);
    }
  }
  bool IsFinite(const void* sum) const { return is_finite_(sum, dim_); }
  size_t bytes() const { return bytes_; }           // of a sum
  int64_t row_bytes() const { return row_bytes_; }  // of a gradient row
  // Whether gradient rows are of the compute type, so that one alone needs no conversion.
  bool same_type() const { return same_type_; }
  void Set(void* sum, const void* row) const {  // sum = row
    same_type_ ? set_(row, dim_, sum) : conversion_.load(row, dim_, static_cast<float*>(sum));
  }

 private:
  // sum += rows indices[0] to indices[n - 1]; indices[last] is the last that may be asked for.
  void Add(const char* rows, const uint32_t* indices, uint32_t n, uint32_t last, void* sum) const {
    if (same_type_) return add_(rows, {indices, n, ahead_, last}, dim_, sum);
    for (uint32_t i = 0; i < n; ++i) {
      PrefetchRow<kAnyBytes>(rows + int64_t{indices[std::min(i + ahead_, last)]} * row_bytes_, row_bytes_);
      conversion_.accumulate(rows + int64_t{indices[i]} * row_bytes_, dim_, static_cast<float*>(sum));
    }
  }

  void (*set_)(const void* row, int64_t n, void* sum);
  AddIndexedRows add_;
  bool (*is_finite_)(const void*, int64_t);
  RowConversion conversion_ = {};
  int64_t dim_;
  int64_t row_bytes_;
  size_t bytes_;
  uint32_t ahead_;  // rows that are asked for before they are summed
  bool same_type_;
};

}  // namespace kvtable
