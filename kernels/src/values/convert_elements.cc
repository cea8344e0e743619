#include "kvtable/convert_elements.h"

#include <cstring>

#include "values/row_conversion.h"

namespace kvtable {
namespace {

bool IsSixteenBit(ValueType type) { return type == ValueType::kFloat16 || type == ValueType::kBFloat16; }

}  // namespace

void ConvertElements(ValueType from_type, const void* from, int64_t n, ValueType to_type, void* to) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(n * SizeOf(to_type)));
  } else if (from_type == ValueType::kFloat32 && IsSixteenBit(to_type)) {
    BestRowConversion(to_type).store(static_cast<const float*>(from), n, to);
  } else if (IsSixteenBit(from_type) && to_type == ValueType::kFloat32) {
    BestRowConversion(from_type).load(from, n, static_cast<float*>(to));
  } else {
    throw Error(ErrorCode::kInvalidArgument,
                "Elements are converted from float32 to a 16-bit type, or back.");
  }
}

}  // namespace kvtable
