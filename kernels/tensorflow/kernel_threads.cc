#include "kernel_threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "gpu.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/threadpool.h"

namespace kvtools {

namespace tf = tensorflow;

KernelThreads::KernelThreads(tf::OpKernelContext* ctx, bool may_wait)
    : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
      threads_(std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads)),
      stream_(StreamOf(ctx)),
      may_wait_(may_wait) {}

void KernelThreads::Run(int64_t tasks, const std::function<void(int64_t)>& body) {
  if (tasks <= 1 || threads_ == 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  // Workers and the caller draw task numbers from one counter. The caller waits only for workers that have
  // drawn one, so it never hangs on a pool whose threads are all busy. A worker that starts late finds the
  // counter used up and touches nothing but the shared state.
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mu;
    std::condition_variable done;
    int64_t finished = 0;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  auto work = [state, tasks](const std::function<void(int64_t)>* fn) {
    int64_t ran = 0;
    std::exception_ptr error;
    for (int64_t i = state->next.fetch_add(1); i < tasks; i = state->next.fetch_add(1)) {
      try {
        (*fn)(i);
      } catch (...) {
        error = std::current_exception();
      }
      ++ran;
    }
    if (ran == 0) return;
    std::lock_guard<std::mutex> lock(state->mu);
    state->finished += ran;
    if (error != nullptr) state->error = error;
    if (state->finished == tasks) state->done.notify_all();
  };
  const int64_t workers = std::min<int64_t>(threads_, tasks) - 1;
  try {
    for (int64_t w = 0; w < workers; ++w) pool_->Schedule([work, fn = &body] { work(fn); });
  } catch (...) {
    // No memory to ask for more workers: those there are, and the caller, do it all. Those that have begun
    // use `body`, so that nobody leaves here before them.
  }
  work(&body);
  std::unique_lock<std::mutex> lock(state->mu);
  state->done.wait(lock, [&] { return state->finished == tasks; });
  if (state->error != nullptr) std::rethrow_exception(state->error);
}

}  // namespace kvtools
