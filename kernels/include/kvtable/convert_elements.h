// Elements of rows from one type into another.
#pragma once

#include <cstdint>

#include "kvtable/types.h"

namespace kvtable {

// From float32 to a 16-bit type, rounding to nearest, ties to even, or back; or a copy, of one type to the
// same. Throws Error(kInvalidArgument) for other types.
void ConvertElements(ValueType from_type, const void* from, int64_t n, ValueType to_type, void* to);

}  // namespace kvtable
