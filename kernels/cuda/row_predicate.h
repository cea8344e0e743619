// Whether a row is meant, by its key and its stamp.
#pragma once

#include <cstdint>

#include "device_rows.h"
#include "host_device.h"
#include "kvtable/device_table.h"

namespace kvtable {

KVTABLE_HOST_DEVICE inline bool Holds(const RowPredicate& predicate, uint64_t key, const DeviceStamp& stamp) {
  const uint64_t masked = key & predicate.key_mask;
  return stamp.frequency >= predicate.least_frequency && stamp.frequency <= predicate.most_frequency &&
         stamp.version >= predicate.least_version && stamp.version <= predicate.most_version &&
         masked >= predicate.least_key && masked <= predicate.most_key;
}

}  // namespace kvtable
