// Tables that keep few of their rows in memory.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "check.h"
#include "kvtable/table.h"

namespace kvtable {

// A folder of its own for a process's spill files, where TMPDIR says.
inline const std::string& SpillFolder() {
  static const std::string folder = [] {
    const char* const tmp = std::getenv("TMPDIR");
    std::string name = std::string(tmp == nullptr ? "/tmp" : tmp) + "/kvtable-spill-XXXXXX";
    CHECK(::mkdtemp(name.data()) != nullptr);
    std::atexit([] { ::rmdir(SpillFolder().c_str()); });  // nothing is in it
    return name;
  }();
  return folder;
}

// The options, with memory for `rows` rows of `row_bytes` bytes in each shard.
inline TableOptions Spilled(TableOptions options, int64_t row_bytes, int64_t rows = 64) {
  constexpr int64_t kBesideRow = 20;
  if (options.shards == 0) options.shards = 8;
  options.max_memory = options.shards * rows * (row_bytes + kBesideRow);
  options.spill = SpillFolder();
  options.name = "spilled";
  return options;
}

}  // namespace kvtable
