// What a lookup says of missing keys, said to a table.
#pragma once

#include "kvtable/lookup_parts.h"

namespace kvtable {

// For a lookup that inserts.
Insertion InsertionOf(const Table& table, const MissingKeys& missing);

}  // namespace kvtable
