#include "thread_pools.h"

#include <map>
#include <mutex>

namespace kvtable {

std::shared_ptr<ParallelFor> PoolOf(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ParallelFor>> pools;
  std::lock_guard<std::mutex> hold(mutex);
  std::shared_ptr<ParallelFor> pool = pools[threads].lock();
  if (pool == nullptr) {
    pool = MakeThreadPool(threads);
    pools[threads] = pool;
  }
  return pool;
}

}  // namespace kvtable
