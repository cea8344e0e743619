// One update of a table at a time, for updates that read rows, change them in other ops and write them back.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace kvtools {

// A lock that is waited for without a thread. Requests are granted in their order.
class UpdateLock {
 public:
  // Who wants the lock. `decided` is called once: with true when the lock is the caller's, with false when
  // the request was cancelled before.
  struct Request {
    std::function<void(bool)> decided;

   private:
    friend class UpdateLock;
    bool waits = false;
    bool cancelled = false;
  };

  // Calls `decided`, at once if the lock is free, else from another thread.
  void Acquire(const std::shared_ptr<Request>& request);

  // Ends a request that is waiting, or that will be made. One that has been decided stays as it is.
  void Cancel(const std::shared_ptr<Request>& request);

  // Hands the lock to the next request.
  void Release();

 private:
  std::mutex mu_;
  bool held_ = false;
  std::deque<std::shared_ptr<Request>> waiting_;
};

}  // namespace kvtools
