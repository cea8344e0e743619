// Threads that run where no other thread wants the processor.
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "kvtable/parallel_for.h"

namespace kvtable {
namespace {

// How often the waiting thread, which has its usual priority, calls a body itself.
constexpr std::chrono::milliseconds kLentEvery{50};
constexpr int kBestEffortLast = 2 << 13 | 7;  // of ioprio_set(2): behind all others, and never without a turn

// For the calling thread. What the system refuses is left as it is.
void TakeLowestPriority() {
  const sched_param none = {};
  sched_setscheduler(0, SCHED_IDLE, &none);
  setpriority(PRIO_PROCESS, 0, 19);  // where idle threads are not allowed
  syscall(SYS_ioprio_set, 1 /* a thread */, 0, kBestEffortLast);
  pthread_setname_np(pthread_self(), "kv-background");
}

class BackgroundThreads : public ParallelFor {
 public:
  explicit BackgroundThreads(int threads) : threads_(std::max(threads, 1)) {}

  int threads() const override { return threads_; }

  // The threads live as long as a call: it takes long, and a process may be forked between two.
  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable left;
    int inside = 0;            // under `mutex`
    std::exception_ptr error;  // under `mutex`
    const auto call_next = [&] {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks) return false;
      try {
        body(i);
      } catch (...) {
        const std::lock_guard<std::mutex> hold(mutex);
        if (!error) error = std::current_exception();
      }
      return true;
    };
    std::vector<std::thread> workers;
    try {
      for (int i = 0; i < std::min<int64_t>(threads_, tasks); ++i) {
        {
          const std::lock_guard<std::mutex> hold(mutex);
          ++inside;
        }
        workers.emplace_back([&] {
          TakeLowestPriority();
          while (call_next()) sched_yield();  // some kernels let others in at a system call only
          const std::lock_guard<std::mutex> hold(mutex);
          --inside;
          left.notify_one();
        });
      }
    } catch (const std::system_error&) {  // no more threads to be had: fewer do it
      const std::lock_guard<std::mutex> hold(mutex);
      --inside;
    }
    if (workers.empty()) {
      while (call_next()) {
      }
    }
    for (std::unique_lock<std::mutex> hold(mutex);
         !left.wait_for(hold, kLentEvery, [&] { return inside == 0; });) {
      hold.unlock();
      call_next();
      hold.lock();
    }
    for (std::thread& worker : workers) worker.join();
    if (error) std::rethrow_exception(error);
  }

 private:
  const int threads_;
};

}  // namespace

std::unique_ptr<ParallelFor> MakeBackgroundThreads(int threads) {
  return std::make_unique<BackgroundThreads>(threads);
}

}  // namespace kvtable
