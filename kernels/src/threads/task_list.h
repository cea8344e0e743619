// Tasks of several jobs, to be run as one batch: job j has some pieces, numbered from 0.
#pragma once

#include <cstdint>
#include <vector>

#include "threads/run_phases.h"
#include "threads/run_tasks.h"

namespace kvtable {

class TaskList {
 public:
  void Add(size_t job, int64_t pieces) {
    for (int64_t piece = 0; piece < pieces; ++piece) tasks_.push_back({job, piece});
  }

  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

  // Calls body(job, piece) for each.
  template <class Body>
  void Run(ParallelFor& threads, const Body& body) const {
    RunTasks(threads, size(), [&](int64_t t) { Call(t, body); });
  }
  // The same as a phase of RunPhases.
  template <class Body>
  auto AsPhase(const Body& body) const {
    return Phase{[this] { return size(); }, [this, body](int64_t t) { Call(t, body); }};
  }

 private:
  template <class Body>
  void Call(int64_t t, const Body& body) const {
    const Task& task = tasks_[static_cast<size_t>(t)];
    body(task.job, task.piece);
  }
  struct Task {
    size_t job;
    int64_t piece;
  };
  std::vector<Task> tasks_;
};

}  // namespace kvtable
