// The loops of pooled lookups, whatever the rows come from.
//
// `Rows` gives them: Row(i) is the row of id i, where i is the one asked for last or the next; the rows of
// ids from there to block_end() lie behind each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvtable/bags.h"
#include "threads/task_list.h"
#include "training/sum_rows.h"

namespace kvtable {

// Pools bags [first, last) into `pooled` (bags, dim).
template <class T, class Rows>
void PoolBags(const Bags& bags, Combiner combiner, int64_t dim, int64_t first, int64_t last, Rows& rows,
              T* pooled) {
  using Compute = ComputeOf<T>;
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  std::vector<Compute> sum(static_cast<size_t>(dim));
  for (int64_t bag = first; bag < last; ++bag) {
    if (weights == nullptr && bags.end(bag) == bags.begin(bag) + 1) {  // whatever the combiner
      std::copy_n(rows.Row(bags.begin(bag)), dim, pooled + bag * dim);
      continue;
    }
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
    StoreQuotient(sum.data(), bags.Divisor<Compute>(bag, combiner), dim, pooled + bag * dim);
  }
}

// The gradient with respect to the weights of bags [first, last), given what was `pooled` and the `gradient`
// with respect to that, both (bags, dim). `out` has a place for each id of the bags' input.
template <class T, class Rows>
void FindWeightsGradient(const Bags& bags, Combiner combiner, int64_t dim, int64_t first, int64_t last,
                         Rows& rows, const T* pooled, const T* gradient, ComputeOf<T>* out) {
  using Compute = ComputeOf<T>;
  const Compute* const weights = static_cast<const Compute*>(bags.weights());
  for (int64_t bag = first; bag < last; ++bag) {
    const T* const of_bag = gradient + bag * dim;
    const Compute divisor = bags.Divisor<Compute>(bag, combiner);
    // The divisor depends on the weight, too: it shrinks what was pooled.
    const Compute along = combiner == Combiner::kSum ? 0 : DotRows(of_bag, pooled + bag * dim, dim);
    for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      const T* const row = rows.Row(i);
      if (bags.source(i) == Bags::kFiller || divisor == 0) continue;
      const Compute share = combiner == Combiner::kSqrtN ? weights[i] / divisor : 1;
      out[bags.source(i)] = (DotRows(of_bag, row, dim) - share * along) / divisor;
    }
  }
}

// Calls body(job, first bag, last bag) for ranges of the bags of all jobs, each of which has `bags`: for all
// bags at once where may_be_cut(job) says no.
template <class Job, class MayBeCut, class Body>
void ForBagRanges(const std::vector<Job>& jobs, ParallelFor& threads, const MayBeCut& may_be_cut,
                  const Body& body) {
  constexpr int64_t kLeastIds = 2048;  // of a task
  TaskList tasks;
  std::vector<int64_t> ranges;
  for (const Job& job : jobs) {
    const int64_t work = (job.bags->ids() + job.bags->size()) / kLeastIds;
    const int64_t most = threads.threads() == 1 ? 1 : int64_t{4} * threads.threads();
    ranges.push_back(may_be_cut(job) ? std::max<int64_t>(1, std::min(work, most)) : 1);
    tasks.Add(ranges.size() - 1, ranges.back());
  }
  tasks.Run(threads, [&](size_t j, int64_t piece) {
    const Bags& bags = *jobs[j].bags;
    body(jobs[j], bags.RangeBegin(piece, ranges[j]), bags.RangeBegin(piece + 1, ranges[j]));
  });
}

}  // namespace kvtable
