// How the table engine gets threads: the caller lends them.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace kvtable {

// What EnsureSlots throws, having changed nothing, where it would have to wait for exports of one moment and its caller
// may not.
class MustWait : public std::exception {
 public:
  const char* what() const noexcept override { return "an export of one moment is open"; }
};

// Runs a body over ranges. TensorFlow ops implement it over the intra-op pool; everybody else uses
// MakeThreadPool().
class ParallelFor {
 public:
  virtual ~ParallelFor() = default;

  // How many bodies may run at once, the caller's thread included. At least 1.
  virtual int threads() const = 0;

  // Calls body(i) once for each i in [0, tasks), on any thread and in any order, and returns when all have
  // returned. An exception of a body is rethrown here, after the others have finished. Bodies don't call Run
  // themselves.
  virtual void Run(int64_t tasks, const std::function<void(int64_t)>& body) = 0;

  // Where tables in device memory queue their work: a DeviceStream.
  virtual void* stream() const { return nullptr; }

  // Whether the caller's thread may wait for an export of one moment to end. Not where the export may need that very
  // thread for its rows to be taken.
  virtual bool may_wait() const { return true; }
};

// Runs every body on the calling thread.
ParallelFor& Serial();

// A pool of `threads` - 1 workers and the calling thread. Run may be called from several threads at once.
// 0 takes the number of CPUs this process may use.
std::unique_ptr<ParallelFor> MakeThreadPool(int threads);

// `threads` threads (at least 1) of the lowest priority, for work that nobody shall notice: they run where no other
// thread wants the processor. Run waits for them, and calls a body itself now and then, so that the work ends
// on a machine that is never idle, too. Bodies should be short, and hold no lock that others wait for.
std::unique_ptr<ParallelFor> MakeBackgroundThreads(int threads);

}  // namespace kvtable
