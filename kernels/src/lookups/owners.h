// The parts that own the keys of a batch.
#pragma once

#include <cstdint>

#include "kvtable/part_of.h"
#include "kvtable/types.h"

namespace kvtable {

// Calls visit(Key{}) with the type of the keys, signed where they are.
template <class Visit>
decltype(auto) VisitSignedKeyType(KeyType type, const Visit& visit) {
  switch (type) {
    case KeyType::kInt32:
      return visit(int32_t{});
    case KeyType::kUint64:
      return visit(uint64_t{});
    case KeyType::kInt64:
      break;
  }
  return visit(int64_t{});
}

// Writes the part of each of keys[begin, end) to owners[0, end - begin), and counts them in counts (parts).
inline void FindOwners(KeyType type, const void* keys, int64_t begin, int64_t end, int64_t parts,
                       uint32_t* owners, int64_t* counts) {
  VisitSignedKeyType(type, [&](auto k) {
    using Key = decltype(k);
    const Key* const typed = static_cast<const Key*>(keys) + begin;
    const PartOf<Key> part_of(parts);
    for (int64_t i = 0; i < end - begin; ++i) {
      const int64_t owner = part_of(typed[i]);
      owners[i] = static_cast<uint32_t>(owner);
      ++counts[owner];
    }
  });
}

}  // namespace kvtable
