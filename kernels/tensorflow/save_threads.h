// The threads of a save or a restore. They are their own: one that waits for a disk, or works for seconds, must not
// have TensorFlow's, which steps wait for.
#pragma once

#include <functional>

namespace kvtools {

enum class SavePriority {
  kUsual,
  kBeside,  // gives way to other threads: a save beside training
};

// Calls work(0) ... work(threads - 1), each on a thread, and returns when all have returned. At the usual
// priority the caller is one of the threads. Where the system has no more threads, fewer do the work: some
// calls come one after the other.
void RunOnThreads(int threads, SavePriority priority, const std::function<void(int)>& work);

}  // namespace kvtools
