#include "save_threads.h"

#include <sys/resource.h>

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace kvtools {
namespace {

// A quarter of what a thread of training gets where both want one processor. Not the least there is: the
// thread holds locks of the table for moments, and training waits for them.
constexpr int kNiceBeside = 6;

}  // namespace

void RunOnThreads(int threads, SavePriority priority, const std::function<void(int)>& work) {
  std::mutex mutex;
  std::exception_ptr error;
  const auto call = [&](int number) {
    try {
      work(number);
    } catch (...) {
      const std::lock_guard<std::mutex> hold(mutex);
      if (error == nullptr) error = std::current_exception();
    }
  };
  const bool beside = priority == SavePriority::kBeside;
  std::vector<std::thread> started;
  int number = beside ? 0 : 1;
  try {
    for (; number < threads; ++number) {
      started.emplace_back([&call, number, beside] {
        if (beside) setpriority(PRIO_PROCESS, 0, kNiceBeside);  // of this thread, on Linux
        call(number);
      });
    }
  } catch (const std::system_error&) {
    for (; number < threads; ++number) call(number);
  }
  if (!beside) call(0);
  for (std::thread& thread : started) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace kvtools
