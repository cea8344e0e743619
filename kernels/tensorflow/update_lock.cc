#include "update_lock.h"

#include <algorithm>
#include <utility>

#include "tensorflow/core/platform/env.h"

namespace kvtools {

void UpdateLock::Acquire(const std::shared_ptr<Request>& request) {
  bool granted = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!request->cancelled && held_) {
      waiting_.push_back(request);
      request->waits = true;
      return;
    }
    granted = !request->cancelled;
    held_ = held_ || granted;
  }
  request->decided(granted);
}

void UpdateLock::Cancel(const std::shared_ptr<Request>& request) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    request->cancelled = true;
    if (!request->waits) return;
    request->waits = false;
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), request));
  }
  request->decided(false);
}

void UpdateLock::Release() {
  std::shared_ptr<Request> next;
  {
    std::lock_guard<std::mutex> lock(mu_);
    held_ = !waiting_.empty();
    if (!held_) return;
    next = std::move(waiting_.front());
    waiting_.pop_front();
    next->waits = false;
  }
  // Not here: what follows in that step must not run inside whatever let go of the lock.
  try {
    tensorflow::Env::Default()->SchedClosure([next] { next->decided(true); });
  } catch (...) {  // no memory for that; nobody must wait forever
    next->decided(true);
  }
}

}  // namespace kvtools
