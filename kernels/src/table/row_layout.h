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

  // The layout of rows of `generation`, which follows that of `before` (null: the first one). Throws
  // Error(kInvalidArgument) on slots that cannot be.
  RowLayout(ValueType value_type, int64_t dim, std::vector<SlotSpec> slot_specs, uint64_t generation = 1,
            const RowLayout* before = nullptr);

  // The column that had this number in `found_in` (kAnyGeneration: whichever has it), or
  // Error(kFailedPrecondition) where it is not there any more, or not `width` elements wide.
  const Column& At(int column, int64_t width, uint64_t found_in) const;

  // Gives every slot of a row, whose value is already there, its initial contents.
  void InitializeSlots(char* row) const;
  // The same for one column: 1 is slot 0.
  void InitializeSlot(int column, char* row) const;

  ValueType value_type;
  std::vector<SlotSpec> slots;
  std::vector<Column> columns;  // 0 is the value, i + 1 is slot i
  int64_t value_bytes;
  int64_t row_bytes;
  uint64_t generation;

 private:
  std::vector<uint64_t> since_;    // of each column: the generation from which on it has been where it is
  std::vector<char> constants_;    // slots of a new row; zeros where a slot copies the value
  std::vector<int> value_copies_;  // the columns that do
};

}  // namespace kvtable
