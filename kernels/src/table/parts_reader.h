// One pass over the parts of a variable.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/lookup_parts.h"

namespace kvtable {

class ShardedTable;
struct Shard;

// Looks up keys of all parts as if they were one table, whose shards are those of all of them: rows are copied to their
// places in the order of the keys, and no key is sorted by part first.
class PartsReader {
 public:
  // Whether parts can be read so: those of a bounded table, with rows that age or in a file, or of different kinds
  // cannot.
  explicit PartsReader(const TableParts& parts);
  bool can_read() const { return !tables_.empty(); }

  // Copies the values of those of keys (n) that have rows in shards that nobody writes. Lists the others in left (n),
  // and returns how many they are; where most keys of a block have no row, that is all that come after it, too.
  // With `counts`, keys that were found are counted as looked up.
  int64_t Read(const void* keys, int64_t n, const RowsOut& out, bool counts, uint32_t* left) const;

 private:
  template <class Key, class RowCopy>
  int64_t ReadKeys(const Key* keys, int64_t n, const RowsOut& out, RowCopy copy, bool counts,
                   uint32_t* left) const;

  std::vector<ShardedTable*> tables_;
  std::vector<const Shard*> shards_;  // those of the first table, then those of the second...
};

}  // namespace kvtable
