#include "kvtable/pool_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "elements.h"
#include "run_tasks.h"
#include "scratch.h"
#include "sum_rows.h"
#include "task_list.h"

namespace kvtable {
namespace {

constexpr int64_t kLeastIds = 2048;  // of a task
constexpr int64_t kBlockBytes = int64_t{128}
                                << 10;  // rows found at a time: they are read again from the L2 cache
constexpr int64_t kLeastBlock = 64;
constexpr int64_t kMostBlock = 4096;

// Finds the rows of ids, a block at a time, in the order in which they are asked for.
template <class T>
class RowsInTurn {
 public:
  RowsInTurn(const TableParts& parts, const MissingKeys& missing, const Bags& bags, int64_t first,
             int64_t end)
      : parts_(parts),
        missing_(missing),
        bags_(bags),
        dim_(parts[0]->dim()),
        block_(IsOneBatch(parts, missing)
                   ? std::max<int64_t>(1, end - first)
                   : std::min(kMostBlock, std::max(kLeastBlock, kBlockBytes / (dim_ * int64_t{sizeof(T)})))),
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

template <class T>
void PoolRange(const PooledLookup& lookup, int64_t first, int64_t last) {
  using Compute = typename Element<T>::Compute;
  const Bags& bags = *lookup.bags;
  const int64_t dim = lookup.parts[0]->dim();
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  RowsInTurn<T> rows(lookup.parts, lookup.missing, bags, bags.begin(first), bags.begin(last));
  std::vector<Compute> sum(static_cast<size_t>(dim));
  for (int64_t bag = first; bag < last; ++bag) {
    std::fill(sum.begin(), sum.end(), Compute{0});
    for (int64_t i = bags.begin(bag); i < bags.end(bag);) {
      const T* row = rows.Row(i);
      const int64_t stop = std::min(bags.end(bag), rows.block_end());
      for (; i < stop; ++i, row += dim) {
        if (weights == nullptr) {
          AddRow(row, dim, sum.data());
        } else {
          AddScaledRow(row, weights[i], dim, sum.data());
        }
      }
    }
    StoreQuotient(sum.data(), bags.Divisor<Compute>(bag, lookup.combiner), dim,
                  static_cast<T*>(lookup.rows) + bag * dim);
  }
}

template <class T>
void WeightsGradientRange(const PooledWeightsGradient& lookup, int64_t first, int64_t last) {
  using Compute = typename Element<T>::Compute;
  const Bags& bags = *lookup.bags;
  const int64_t dim = lookup.parts[0]->dim();
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  Compute* const out = static_cast<Compute*>(lookup.weights);
  MissingKeys missing = lookup.missing;
  missing.insert = false;
  RowsInTurn<T> rows(lookup.parts, missing, bags, bags.begin(first), bags.begin(last));
  for (int64_t bag = first; bag < last; ++bag) {
    const T* const pooled = static_cast<const T*>(lookup.rows) + bag * dim;
    const T* const gradient = static_cast<const T*>(lookup.gradient) + bag * dim;
    const Compute divisor = bags.Divisor<Compute>(bag, lookup.combiner);
    // The divisor depends on the weight, too: it shrinks what was pooled.
    const Compute along = lookup.combiner == Combiner::kSum ? 0 : DotRows(gradient, pooled, dim);
    for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      const T* const row = rows.Row(i);
      if (bags.source(i) == Bags::kFiller || divisor == 0) continue;
      const Compute share = lookup.combiner == Combiner::kSqrtN ? weights[i] / divisor : 1;
      out[bags.source(i)] = (DotRows(gradient, row, dim) - share * along) / divisor;
    }
  }
}

// Calls body(job, first bag, last bag) for ranges of the bags of all jobs.
template <class Job, class Body>
void ForBagRanges(const std::vector<Job>& jobs, ParallelFor& threads, const Body& body) {
  TaskList tasks;
  std::vector<int64_t> ranges;
  for (const Job& job : jobs) {
    const int64_t work = (job.bags->ids() + job.bags->size()) / kLeastIds;
    const int64_t most = threads.threads() == 1 ? 1 : int64_t{4} * threads.threads();
    ranges.push_back(IsOneBatch(job.parts, job.missing) ? 1 : std::max<int64_t>(1, std::min(work, most)));
    tasks.Add(ranges.size() - 1, ranges.back());
  }
  tasks.Run(threads, [&](size_t j, int64_t piece) {
    const Bags& bags = *jobs[j].bags;
    body(jobs[j], bags.RangeBegin(piece, ranges[j]), bags.RangeBegin(piece + 1, ranges[j]));
  });
}

}  // namespace

void PoolRows(const std::vector<PooledLookup>& lookups, ParallelFor& threads) {
  ForBagRanges(lookups, threads, [](const PooledLookup& lookup, int64_t first, int64_t last) {
    VisitValueType(lookup.bags->value_type(), [&](auto t) { PoolRange<decltype(t)>(lookup, first, last); });
  });
}

void PoolWeightsGradient(const std::vector<PooledWeightsGradient>& lookups, ParallelFor& threads) {
  ForBagRanges(lookups, threads, [](const PooledWeightsGradient& lookup, int64_t first, int64_t last) {
    VisitValueType(lookup.bags->value_type(),
                   [&](auto t) { WeightsGradientRange<decltype(t)>(lookup, first, last); });
  });
}

}  // namespace kvtable
