#include "kvtable/split_by_part.h"

#include <algorithm>
#include <cstring>

#include "lookups/owners.h"
#include "memory/copy_rows.h"
#include "threads/run_tasks.h"

namespace kvtable {

SplitByPart::SplitByPart(KeyType key_type, const void* keys, int64_t n, int64_t parts, ParallelFor& threads)
    : key_type_(key_type),
      keys_(keys),
      n_(n),
      parts_(parts),
      owners_(new uint32_t[static_cast<size_t>(n)]),
      begins_(static_cast<size_t>(ranges() * parts)),
      counts_(static_cast<size_t>(parts)) {
  RunTasks(threads, ranges(), [&](int64_t r) {
    const int64_t begin = r * kRange;
    FindOwners(key_type, keys, begin, std::min(n, begin + kRange), parts, owners_.get() + begin,
               begins_.data() + r * parts);
  });
  for (int64_t p = 0; p < parts; ++p) {
    int64_t total = 0;
    for (int64_t r = 0; r < ranges(); ++r) {
      int64_t& begin = begins_[static_cast<size_t>(r * parts + p)];
      total += begin;
      begin = total - begin;
    }
    counts_[static_cast<size_t>(p)] = total;
  }
}

void SplitByPart::Write(const void* rows, int64_t row_bytes, const uint64_t* positions,
                        const std::vector<Share>& shares, ParallelFor& threads) const {
  const auto write = [&](const auto* keys, auto known) {
    using Key = std::decay_t<decltype(*keys)>;
    constexpr int64_t kBytes = decltype(known)::value;
    const char* const from = static_cast<const char*>(rows);
    RunTasks(threads, ranges(), [&](int64_t r) {
      std::vector<int64_t> next(begins_.begin() + r * parts_, begins_.begin() + (r + 1) * parts_);
      const int64_t end = std::min(n_, (r + 1) * kRange);
      for (int64_t i = r * kRange; i < end; ++i) {
        const uint32_t owner = owners_[static_cast<size_t>(i)];
        const Share& share = shares[owner];
        const int64_t at = next[owner]++;
        static_cast<Key*>(share.keys)[at] = keys[i];
        if (from != nullptr) {
          CopyRow<kBytes>(static_cast<char*>(share.rows) + at * row_bytes, from + i * row_bytes, row_bytes);
        }
        if (share.places != nullptr) share.places[at] = static_cast<uint32_t>(i);
        if (positions != nullptr) share.positions[at] = positions[i];
      }
    });
  };
  VisitRowBytes(row_bytes, [&](auto known) {
    if (SizeOf(key_type_) == 4) {
      write(static_cast<const uint32_t*>(keys_), known);
    } else {
      write(static_cast<const uint64_t*>(keys_), known);
    }
  });
}

}  // namespace kvtable
