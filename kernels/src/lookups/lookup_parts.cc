#include "kvtable/lookup_parts.h"

#include <algorithm>
#include <cstring>

#include "lookups/insertion_of.h"
#include "lookups/owners.h"
#include "memory/scratch.h"
#include "table/parts_reader.h"
#include "threads/run_tasks.h"
#include "threads/task_list.h"

namespace kvtable {
namespace {

constexpr int64_t kLeastKeys = 4096;  // of a task: the parts share them
constexpr int64_t kMostBytes = int64_t{512}
                               << 10;  // of a task's rows: they stay in cache until all parts wrote theirs

// Keys (n), part by part: the row of key i goes to place i, or to place where_of[i].
void LookUpByPart(const PartsLookup& lookup, const void* keys, int64_t n, const RowsOut& out,
                  const uint32_t* where_of) {
  const KeyType key_type = lookup.parts[0]->key_type();
  const int64_t key_bytes = SizeOf(key_type);
  const size_t parts = lookup.parts.size();
  Scratch<uint32_t> owners(static_cast<size_t>(n));
  std::vector<int64_t> counts(parts);
  FindOwners(key_type, keys, 0, n, static_cast<int64_t>(parts), owners.data(), counts.data());
  std::vector<int64_t> next(parts);
  for (size_t p = 1; p < parts; ++p) next[p] = next[p - 1] + counts[p - 1];
  Scratch<uint64_t> part_keys(static_cast<size_t>(n));
  Scratch<uint32_t> where(static_cast<size_t>(n));
  const auto sort = [&](const auto* from, auto* to) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = next[owners[static_cast<size_t>(i)]]++;
      to[at] = from[i];
      where[static_cast<size_t>(at)] = where_of == nullptr ? static_cast<uint32_t>(i) : where_of[i];
    }
  };
  if (key_bytes == 4) {
    sort(static_cast<const uint32_t*>(keys), reinterpret_cast<uint32_t*>(part_keys.data()));
  } else {
    sort(static_cast<const uint64_t*>(keys), part_keys.data());
  }
  int64_t at = 0;
  for (size_t p = 0; p < parts; at += counts[p], ++p) {
    if (counts[p] == 0) continue;
    const char* const own = reinterpret_cast<const char*>(part_keys.data()) + at * key_bytes;
    LookUpOne(lookup.parts[p], own, counts[p], out.WithPlaces(where.data() + at), lookup.missing, Serial());
  }
}

// Keys [begin, end), each from its part.
void LookUpRange(const PartsLookup& lookup, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  if (n == 0) return;
  const KeyType key_type = lookup.parts[0]->key_type();
  const int64_t key_bytes = SizeOf(key_type);
  const int64_t row_bytes = lookup.out.row_bytes(lookup.parts[0]->value_type(), lookup.parts[0]->dim());
  const RowsOut out(lookup.out.rows + begin * row_bytes,
                    lookup.out.positions == nullptr ? nullptr : lookup.out.positions + begin, nullptr,
                    lookup.out.widened);
  const char* const keys = static_cast<const char*>(lookup.keys) + begin * key_bytes;
  if (lookup.parts.size() == 1) {
    LookUpOne(lookup.parts[0], keys, n, out, lookup.missing, Serial());
    return;
  }
  const PartsReader reader(lookup.parts);
  if (!reader.can_read() || IsOneBatch(lookup.parts, lookup.missing)) {
    LookUpByPart(lookup, keys, n, out, nullptr);
    return;
  }
  Scratch<uint32_t> left(static_cast<size_t>(n));
  const int64_t num_left = reader.Read(keys, n, out, lookup.missing.insert, left.data());
  if (num_left == 0) return;
  Scratch<uint64_t> left_keys(static_cast<size_t>(num_left));
  const auto pick = [&](const auto* from, auto* to) {
    for (int64_t i = 0; i < num_left; ++i) to[i] = from[left[static_cast<size_t>(i)]];
  };
  if (key_bytes == 4) {
    pick(reinterpret_cast<const uint32_t*>(keys), reinterpret_cast<uint32_t*>(left_keys.data()));
  } else {
    pick(reinterpret_cast<const uint64_t*>(keys), left_keys.data());
  }
  LookUpByPart(lookup, left_keys.data(), num_left, out, left.data());
}

}  // namespace

Insertion InsertionOf(const Table& table, const MissingKeys& missing) {
  Insertion insertion;
  insertion.stamp = missing.stamp;
  insertion.admission = missing.admission;
  insertion.admission_seed = missing.admission_seed;
  insertion.admitter = table.admitter().get();
  insertion.below = missing.below;
  return insertion;
}

void LookUpOne(Table* table, const void* keys, int64_t n, const RowsOut& out, const MissingKeys& missing,
               ParallelFor& threads) {
  if (missing.insert) {
    table->GatherOrInsert(keys, n, out, InsertionOf(*table, missing), threads);
  } else {
    table->Gather(keys, n, out, missing.missing, nullptr, 0, nullptr, threads);
  }
}

void LookUpParts(const PartsLookup& lookup) { LookUpRange(lookup, 0, lookup.n); }

void LookUpParts(const std::vector<PartsLookup>& lookups, ParallelFor& threads) {
  if (lookups.size() == 1 && lookups[0].parts.size() == 1) {
    const PartsLookup& only = lookups[0];
    LookUpOne(only.parts[0], only.keys, only.n, only.out, only.missing, threads);
    return;
  }
  TaskList tasks;
  std::vector<int64_t> ranges;
  for (const PartsLookup& lookup : lookups) {
    const int64_t row_bytes = lookup.out.row_bytes(lookup.parts[0]->value_type(), lookup.parts[0]->dim());
    const int64_t most_keys = std::max<int64_t>(1024, kMostBytes / row_bytes);
    const int64_t least = (lookup.n + most_keys - 1) / most_keys;
    const int64_t shared = std::min<int64_t>(lookup.n / kLeastKeys, int64_t{4} * threads.threads());
    ranges.push_back(IsOneBatch(lookup.parts, lookup.missing)
                         ? 1
                         : std::max<int64_t>({1, least, threads.threads() == 1 ? 1 : shared}));
    tasks.Add(ranges.size() - 1, ranges.back());
  }
  tasks.Run(threads, [&](size_t job, int64_t piece) {
    const PartsLookup& lookup = lookups[job];
    LookUpRange(lookup, lookup.n * piece / ranges[job], lookup.n * (piece + 1) / ranges[job]);
  });
}

}  // namespace kvtable
