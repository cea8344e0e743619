// Whether a row is meant, by its stamp.
#pragma once

#include "device_rows.h"
#include "host_device.h"
#include "kvtable/device_table.h"

namespace kvtable {

KVTABLE_HOST_DEVICE inline bool Holds(const RowPredicate& predicate, const DeviceStamp& stamp) {
  switch (predicate.test) {
    case RowPredicate::Test::kFrequencyBelow:
      return stamp.frequency < predicate.bound;
    case RowPredicate::Test::kFrequencyAtLeast:
      return stamp.frequency >= predicate.bound;
    case RowPredicate::Test::kVersionBelow:
      return stamp.version < predicate.bound;
    case RowPredicate::Test::kVersionAtLeast:
      return stamp.version >= predicate.bound;
    default:
      return true;
  }
}

}  // namespace kvtable
