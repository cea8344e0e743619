// Where each column of a row lies, and what a new row holds in its slots.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/table.h"

namespace kvtable {

// Immutable once made, and shared by the shards that have it.
struct RowLayout {
  struct Column {
    int64_t offset;  // bytes from the start of the row
    int64_t bytes;
  };

  // Throws Error(kInvalidArgument) on slots that cannot be.
  RowLayout(ValueType value_type, int64_t dim, std::vector<SlotSpec> slot_specs);

  // The column, or Error(kFailedPrecondition) where there is none or it is not `width` elements wide (0: any
  // width).
  const Column& At(int column, int64_t width) const;

  // Gives every slot of a row, whose value is already there, its initial contents.
  void InitializeSlots(char* row) const;
  // The same for one column: 1 is slot 0.
  void InitializeSlot(int column, char* row) const;

  ValueType value_type;
  std::vector<SlotSpec> slots;
  std::vector<Column> columns;  // 0 is the value, i + 1 is slot i
  int64_t value_bytes;
  int64_t row_bytes;

 private:
  std::vector<char> constants_;    // slots of a new row; zeros where a slot copies the value
  std::vector<int> value_copies_;  // the columns that do
};

}  // namespace kvtable
