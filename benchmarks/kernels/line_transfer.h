// What it costs one processor to get a cache line that another has just written.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace kvtable {

// Two threads on two processors, where the process has two, write one line in turns: nanoseconds of a turn. 40 to 80 where the
// processors share a cache, 200 and more where they don't. Of a virtual machine that its host moves it may change from
// one minute to the next.
inline double LineTransferNanoseconds(int64_t turns = 200'000) {
  cpu_set_t all;
  pthread_getaffinity_np(pthread_self(), sizeof all, &all);
  const auto stay_on = [&all](int which) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &all) || which-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(pthread_self(), sizeof one, &one);
      return;
    }
  };
  std::atomic<int64_t> ball{0};
  const auto play = [&ball, turns](int64_t parity) {
    for (int64_t turn = parity; turn < turns; turn += 2) {
      for (int spins = 0; ball.load(std::memory_order_acquire) != turn; ++spins) {
        if (spins > 100'000) std::this_thread::yield();
      }
      ball.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  std::thread other([&] {
    stay_on(1);
    play(1);
  });
  stay_on(0);
  play(0);
  other.join();
  pthread_setaffinity_np(pthread_self(), sizeof all, &all);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return 1e9 * seconds / static_cast<double>(turns);
}

}  // namespace kvtable
