#include "table/row_layout.h"

#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "values/elements.h"

namespace kvtable {

RowLayout::RowLayout(ValueType type, int64_t dim, std::vector<SlotSpec> slot_specs, uint64_t number,
                     const RowLayout* before)
    : value_type(type), slots(std::move(slot_specs)), generation(number), since_(1) {
  const int64_t element = SizeOf(type);
  constexpr int64_t kMaxWidth = int64_t{1} << 24;
  value_bytes = dim * element;
  columns.push_back({0, value_bytes});
  row_bytes = value_bytes;
  std::set<std::string> names;
  for (const SlotSpec& slot : slots) {
    if (slot.width <= 0 || slot.width > kMaxWidth) {
      throw Error(ErrorCode::kInvalidArgument, "Slot '" + slot.name + "' has width " +
                                                   std::to_string(slot.width) + "; expected 1 to " +
                                                   std::to_string(kMaxWidth) + ".");
    }
    if (slot.init == SlotSpec::Init::kCopyValue && slot.width != dim) {
      throw Error(ErrorCode::kInvalidArgument,
                  "Slot '" + slot.name + "' copies the value but has width " + std::to_string(slot.width) +
                      "; expected the table's dim, " + std::to_string(dim) + ".");
    }
    if (!names.insert(slot.name).second) {
      throw Error(ErrorCode::kInvalidArgument, "Two slots are named '" + slot.name + "'; names must differ.");
    }
    const size_t i = since_.size() - 1;
    const bool stays = before != nullptr && i < before->slots.size() && before->slots[i].name == slot.name &&
                       before->slots[i].width == slot.width;
    since_.push_back(stays ? before->since_[i + 1] : generation);
    columns.push_back({row_bytes, slot.width * element});
    row_bytes += slot.width * element;
  }
  constants_.resize(static_cast<size_t>(row_bytes - value_bytes));
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].init == SlotSpec::Init::kCopyValue) {
      value_copies_.push_back(static_cast<int>(i) + 1);
      continue;
    }
    VisitAnyValueType(type, [&](auto t) {
      using T = decltype(t);
      if (!IsElement<T>(slots[i].constant)) {
        throw Error(ErrorCode::kInvalidArgument,
                    "Slot '" + slots[i].name + "' starts from " + std::to_string(slots[i].constant) +
                        ", which is no value of the table's integer or bool type.");
      }
      const T constant = Element<T>::FromDouble(slots[i].constant);
      for (int64_t j = 0; j < slots[i].width; ++j) {
        std::memcpy(constants_.data() + columns[i + 1].offset - value_bytes + j * element, &constant,
                    sizeof(T));
      }
    });
  }
}

const RowLayout::Column& RowLayout::At(int column, int64_t width, uint64_t found_in) const {
  const bool is_there = column >= 0 && column < static_cast<int>(columns.size());
  if (found_in != kAnyGeneration && (!is_there || since_[static_cast<size_t>(column)] > found_in)) {
    throw Error(ErrorCode::kFailedPrecondition,
                "The slots of the table have changed since column " + std::to_string(column) +
                    " was looked up (generation " + std::to_string(found_in) + ", now " +
                    std::to_string(generation) + "). Look the slots up again.");
  }
  if (!is_there) {
    throw Error(ErrorCode::kFailedPrecondition, "The table has no column " + std::to_string(column) +
                                                    ": it has " + std::to_string(slots.size()) +
                                                    " slots. Attach the slot with EnsureSlots first.");
  }
  const Column& found = columns[static_cast<size_t>(column)];
  if (width * SizeOf(value_type) != found.bytes) {
    throw Error(ErrorCode::kFailedPrecondition,
                "Column " + std::to_string(column) + " of the table is " +
                    std::to_string(found.bytes / SizeOf(value_type)) + " elements wide; got a buffer for " +
                    std::to_string(width) + ". The slots may have changed meanwhile: look them up again.");
  }
  return found;
}

void RowLayout::InitializeSlots(char* row) const {
  if (columns.size() == 1) return;
  std::memcpy(row + value_bytes, constants_.data(), constants_.size());
  for (int column : value_copies_) std::memcpy(row + columns[column].offset, row, value_bytes);
}

void RowLayout::InitializeSlot(int column, char* row) const {
  const Column& c = columns[column];
  const bool copies = slots[column - 1].init == SlotSpec::Init::kCopyValue;
  std::memcpy(row + c.offset, copies ? row : constants_.data() + c.offset - value_bytes, c.bytes);
}

}  // namespace kvtable
