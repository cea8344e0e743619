#include "kvtable/pool_rows.h"

#include <algorithm>
#include <vector>

#include "lookups/bag_sums.h"
#include "lookups/insertion_of.h"
#include "lookups/pool_bags.h"
#include "memory/scratch.h"
#include "table/rows_in_place.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr int64_t kBlockBytes = int64_t{128}
                                << 10;  // rows found at a time: they are read again from the L2 cache
constexpr int64_t kLeastBlock = 64;

// How many rows of a lookup are found at a time.
int64_t BlockOf(const TableParts& parts) {
  const int64_t row_bytes = parts[0]->dim() * SizeOf(parts[0]->value_type());
  return std::min(RowsInPlace::kMostKeys, std::max(kLeastBlock, kBlockBytes / row_bytes));
}

// Finds the rows of ids, a block at a time, in the order in which they are asked for.
template <class T>
class RowsInTurn {
 public:
  // `missing` inserts nothing.
  RowsInTurn(const TableParts& parts, const MissingKeys& missing, const Bags& bags, int64_t first,
             int64_t end)
      : parts_(parts),
        missing_(missing),
        bags_(bags),
        dim_(parts[0]->dim()),
        block_(BlockOf(parts)),
        end_(end),
        block_begin_(first),
        block_end_(first),
        rows_(static_cast<size_t>(std::min(block_, end - first) * dim_)) {}

  // The row of id i: i is the one asked for last, or the next.
  const T* Row(int64_t i) {
    if (i >= block_end_) {
      block_begin_ = i;
      block_end_ = std::min(i + block_, end_);
      const char* const keys = bags_.keys() + i * SizeOf(bags_.key_type());
      LookUpParts({parts_, keys, block_end_ - i, RowsOut(rows_.data()), missing_});
    }
    return rows_.data() + (i - block_begin_) * dim_;
  }
  // Ids up to here lie behind each other.
  int64_t block_end() const { return block_end_; }

 private:
  const TableParts& parts_;
  const MissingKeys& missing_;
  const Bags& bags_;
  const int64_t dim_;
  const int64_t block_;
  const int64_t end_;
  int64_t block_begin_;
  int64_t block_end_;
  Scratch<T> rows_;
};

void PoolRange(const PooledLookup& lookup, int64_t first, int64_t last) {
  const Bags& bags = *lookup.bags;
  Table* const table = lookup.parts[0];
  const char* const keys = bags.keys();
  const int64_t key_bytes = SizeOf(bags.key_type());
  const int64_t row_bytes = table->dim() * SizeOf(table->value_type());
  const int64_t begin = bags.begin(first);
  const int64_t end = bags.begin(last);
  BagSums sums(bags, bags.value_type(), lookup.combiner, table->dim(), first, last, lookup.rows);
  const bool one_batch = IsOneBatch(lookup.parts, lookup.missing);
  RowsInPlace* const in_place =
      one_batch || lookup.parts.size() > 1 ? nullptr : dynamic_cast<RowsInPlace*>(table);
  const Insertion insertion = InsertionOf(*table, lookup.missing);
  const int64_t block = std::min(end - begin, one_batch ? end - begin : BlockOf(lookup.parts));
  Scratch<char> copies(static_cast<size_t>(block * row_bytes));
  Scratch<const char*> rows(static_cast<size_t>(block));
  for (int64_t i = begin; i < end; i += block) {
    const int64_t n = std::min(block, end - i);
    const char* const block_keys = keys + i * key_bytes;
    const auto add = [&](const char* const* found) { sums.Add(found, n); };
    if (in_place != nullptr &&
        in_place->ReadInPlace(block_keys, n, lookup.missing.insert ? &insertion : nullptr,
                              lookup.missing.missing, add)) {
      continue;
    }
    LookUpParts({lookup.parts, block_keys, n, RowsOut(copies.data()), lookup.missing});
    for (int64_t j = 0; j < n; ++j) rows[static_cast<size_t>(j)] = copies.data() + j * row_bytes;
    add(rows.data());
  }
  sums.Finish();
}

template <class T>
void WeightsGradientRange(const PooledWeightsGradient& lookup, int64_t first, int64_t last) {
  const Bags& bags = *lookup.bags;
  MissingKeys missing = lookup.missing;
  missing.insert = false;
  RowsInTurn<T> rows(lookup.parts, missing, bags, bags.begin(first), bags.begin(last));
  FindWeightsGradient(bags, lookup.combiner, lookup.parts[0]->dim(), first, last, rows,
                      static_cast<const T*>(lookup.rows), static_cast<const T*>(lookup.gradient),
                      static_cast<ComputeOf<T>*>(lookup.weights));
}

// Whether the bags of a lookup may be looked up range by range.
template <class Job>
bool MayBeCut(const Job& job) {
  return !IsOneBatch(job.parts, job.missing);
}

}  // namespace

void PoolRows(const std::vector<PooledLookup>& lookups, ParallelFor& threads) {
  ForBagRanges(
      lookups, threads, MayBeCut<PooledLookup>,
      [](const PooledLookup& lookup, int64_t first, int64_t last) { PoolRange(lookup, first, last); });
}

void PoolWeightsGradient(const std::vector<PooledWeightsGradient>& lookups, ParallelFor& threads) {
  ForBagRanges(lookups, threads, MayBeCut<PooledWeightsGradient>,
               [](const PooledWeightsGradient& lookup, int64_t first, int64_t last) {
                 VisitValueType(lookup.bags->value_type(),
                                [&](auto t) { WeightsGradientRange<decltype(t)>(lookup, first, last); });
               });
}

}  // namespace kvtable
