// The pool behind MakeThreadPool, and the one thread behind Serial.
//
// One mutex guards the queue of jobs and each job's count of workers inside it. A job lives on the stack of
// the thread that called Run, which takes part in the work, removes the job from the queue, and waits until
// no worker is inside. So Run ends even if no worker ever wakes, and may be called from many threads.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {
namespace {

class SerialFor : public ParallelFor {
 public:
  int threads() const override { return 1; }
  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override {
    std::exception_ptr error;
    for (int64_t i = 0; i < tasks; ++i) {
      try {
        body(i);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }
};

struct Job {
  Job(int64_t n, const std::function<void(int64_t)>& f) : tasks(n), body(f) {}

  void Work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        body(i);
      } catch (...) {
        std::lock_guard<std::mutex> hold(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }
  bool exhausted() const { return next.load(std::memory_order_relaxed) >= tasks; }

  const int64_t tasks;
  const std::function<void(int64_t)>& body;
  std::atomic<int64_t> next{0};
  int inside = 0;  // workers; guarded by the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;
};

// What workers share with the pool. Separate, so that a forked child, which has no workers and perhaps a
// locked mutex, can leave it alone.
struct PoolState {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable left;  // a worker has left a job
  std::deque<Job*> jobs;
  bool stop = false;

  void WorkerLoop() {
    std::unique_lock<std::mutex> hold(mutex);
    for (;;) {
      work.wait(hold, [&] { return stop || !jobs.empty(); });
      if (stop) return;
      Job* job = jobs.front();
      if (job->exhausted()) {
        jobs.pop_front();
        continue;
      }
      ++job->inside;
      hold.unlock();
      job->Work();
      hold.lock();
      if (--job->inside == 0) left.notify_all();
    }
  }
};

class ThreadPool : public ParallelFor {
 public:
  explicit ThreadPool(int threads) : state_(std::make_shared<PoolState>()), pid_(::getpid()) {
    for (int i = 1; i < threads; ++i) {
      workers_.emplace_back([state = state_] { state->WorkerLoop(); });
    }
  }

  ~ThreadPool() override {
    if (::getpid() != pid_) {
      // A forked child: the threads are not here, and their mutex may be locked for good. What they captured
      // keeps the state alive, so that nothing waits for them.
      for (std::thread& worker : workers_) worker.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> hold(state_->mutex);
      state_->stop = true;
    }
    state_->work.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const override { return static_cast<int>(workers_.size()) + 1; }

  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override {
    if (tasks <= 1 || workers_.empty() || ::getpid() != pid_) {
      Serial().Run(tasks, body);
      return;
    }
    Job job(tasks, body);
    {
      std::lock_guard<std::mutex> hold(state_->mutex);
      state_->jobs.push_back(&job);
    }
    if (tasks == 2) {
      state_->work.notify_one();
    } else {
      state_->work.notify_all();
    }
    job.Work();
    {
      std::unique_lock<std::mutex> hold(state_->mutex);
      for (auto it = state_->jobs.begin(); it != state_->jobs.end(); ++it) {
        if (*it == &job) {
          state_->jobs.erase(it);
          break;
        }
      }
      state_->left.wait(hold, [&] { return job.inside == 0; });
    }
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  std::shared_ptr<PoolState> state_;
  std::vector<std::thread> workers_;
  const pid_t pid_;
};

int UsableCpus() {
  cpu_set_t cpus;
  if (::sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return CPU_COUNT(&cpus);
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

ParallelFor& Serial() {
  static SerialFor serial;
  return serial;
}

std::unique_ptr<ParallelFor> MakeThreadPool(int threads) {
  if (threads < 0) {
    throw Error(ErrorCode::kInvalidArgument, "A thread pool of " + std::to_string(threads) +
                                                 " threads; expected 0 (one per CPU) or more.");
  }
  if (threads == 0) threads = UsableCpus();
  return std::make_unique<ThreadPool>(threads < 1 ? 1 : threads);
}

}  // namespace kvtable
