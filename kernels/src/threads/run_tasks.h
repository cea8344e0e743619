// ParallelFor without its cost where there is nothing to share out.
#pragma once

#include <cstdint>
#include <functional>

#include "kvtable/parallel_for.h"

namespace kvtable {

template <class Body>
void RunTasks(ParallelFor& threads, int64_t tasks, const Body& body) {
  if (tasks <= 1 || threads.threads() <= 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
  } else {
    threads.Run(tasks, std::cref(body));
  }
}

// Cuts [0, n) into ranges for the threads: a few each, so that a slow one does not hold up the rest, but none
// so small that waking a thread costs more than it does.
class Ranges {
 public:
  Ranges(int64_t n, int64_t at_least, ParallelFor& threads) : n_(n) {
    const int64_t most = threads.threads() <= 1 ? 1 : int64_t{4} * threads.threads();
    count_ = n / at_least < 1 ? 1 : n / at_least < most ? n / at_least : most;
  }
  int64_t count() const { return count_; }
  int64_t begin(int64_t i) const { return n_ / count_ * i + (i < n_ % count_ ? i : n_ % count_); }
  int64_t end(int64_t i) const { return begin(i + 1); }

 private:
  int64_t n_;
  int64_t count_;
};

}  // namespace kvtable
