// Work in phases, each of some tasks, for one call of ParallelFor: to wake a thread costs more than a short phase.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

#include "kvtable/parallel_for.h"
#include "threads/backoff.h"

namespace kvtable {

// What RunPhases calls: task(i) for each i in [0, tasks()). How many there are is asked when the phase before is over,
// by each thread, and must not change then.
template <class Tasks, class Task>
struct Phase {
  Tasks tasks;
  Task task;
};
template <class Tasks, class Task>
Phase(Tasks, Task) -> Phase<Tasks, Task>;

// Runs all tasks of a phase before the first of the next, each on any thread. Threads that come late find what is left.
// A thread that finds no task left waits for those under way, which others have in hand: for microseconds, where tasks
// of a phase are alike. When a task throws, phases after it are left out, and what it threw is thrown here. No phase has
// more than `most` tasks, and no more threads are asked for.
template <class... Phases>
void RunPhases(ParallelFor& threads, int64_t most, const Phases&... phases) {
  struct Progress {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> ended{0};
  };
  std::array<Progress, sizeof...(phases)> progress;
  std::atomic<bool> failed{false};
  const auto take_part = [&](int64_t) {
    std::exception_ptr error;
    size_t number = 0;
    const auto run = [&](const auto& phase) {
      Progress& of_phase = progress[number++];
      const int64_t tasks = phase.tasks();
      for (int64_t i; (i = of_phase.next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        try {
          phase.task(i);
        } catch (...) {
          error = std::current_exception();
          failed.store(true, std::memory_order_relaxed);
        }
        of_phase.ended.fetch_add(1, std::memory_order_release);
      }
      if (number == sizeof...(phases)) return false;  // the caller waits for those who have tasks in hand
      for (Backoff backoff; of_phase.ended.load(std::memory_order_acquire) < tasks;) backoff.Wait();
      return !failed.load(std::memory_order_relaxed);
    };
    static_cast<void>((run(phases) && ...));
    if (error) std::rethrow_exception(error);
  };
  const int64_t wanted = std::min<int64_t>(threads.threads(), most);
  if (wanted <= 1) {
    take_part(0);
  } else {
    threads.Run(wanted, take_part);
  }
}

}  // namespace kvtable
