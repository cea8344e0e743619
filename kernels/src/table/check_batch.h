// How many keys an operation takes.
#pragma once

#include <cstdint>
#include <string>

#include "kvtable/types.h"

namespace kvtable {

inline void CheckBatch(int64_t n) {
  if (n >= 0 && n < int64_t{UINT32_MAX}) return;
  throw Error(ErrorCode::kInvalidArgument,
              "A batch of " + std::to_string(n) + " keys; expected 0 to 4294967294. Split it.");
}

}  // namespace kvtable
