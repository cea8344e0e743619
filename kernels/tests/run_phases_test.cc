// Phases on threads: each task once, none before the phase before it is over; errors; threads that come late or not at
// all; counts of tasks that an earlier phase finds out.
#include "threads/run_phases.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace kvtable {
namespace {

#ifdef KVTABLE_TEST_FEW_ROUNDS
constexpr int kRounds = 50;
#else
constexpr int kRounds = 1000;
#endif

void Ordered(ParallelFor& threads) {
  for (int round = 0; round < kRounds; ++round) {
    const int64_t first_tasks = 1 + round % 7;
    int64_t found = -1;  // by the second phase
    std::vector<int> first(static_cast<size_t>(first_tasks)), third;
    std::atomic<int> ran{0};
    RunPhases(threads, 7,
              Phase{[=] { return first_tasks; }, [&](int64_t i) { ++first[static_cast<size_t>(i)]; }},
              Phase{[] { return 1; },
                    [&](int64_t) {
                      for (const int times : first) CHECK(times == 1);
                      found = round % 5;
                      third.assign(static_cast<size_t>(found), 0);
                    }},
              Phase{[&] { return found; }, [&](int64_t i) { ++third[static_cast<size_t>(i)]; }},
              Phase{[] { return 3; },
                    [&](int64_t) {
                      for (const int times : third) CHECK(times == 1);
                      ++ran;
                    }});
    CHECK(ran == 3);
  }
}

// Phases after the one that threw are left out; its other tasks run.
void Errors(ParallelFor& threads) {
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> ran{0};
    std::atomic<bool> went_on{false};
    bool thrown = false;
    try {
      RunPhases(threads, 6,
                Phase{[] { return 6; },
                      [&](int64_t i) {
                        ++ran;
                        if (i == round % 6) throw std::runtime_error("of a task");
                      }},
                Phase{[] { return 4; }, [&](int64_t) { went_on = true; }});
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown && ran == 6 && !went_on);
    thrown = false;
    try {
      RunPhases(
          threads, round % 9 + 2, Phase{[] { return 2; }, [](int64_t) {}},
          Phase{[=] { return round % 9 + 2; }, [&](int64_t) { throw std::runtime_error("of the last"); }});
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

// Says that it has four threads, and is one.
class Alone : public ParallelFor {
 public:
  int threads() const override { return 4; }
  void Run(int64_t tasks, const std::function<void(int64_t)>& body) override { Serial().Run(tasks, body); }
};

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::Alone alone;
  const std::unique_ptr<kvtable::ParallelFor> two = kvtable::MakeThreadPool(2),
                                              five = kvtable::MakeThreadPool(5);
  for (kvtable::ParallelFor* threads :
       {&kvtable::Serial(), static_cast<kvtable::ParallelFor*>(&alone), two.get(), five.get()}) {
    kvtable::Ordered(*threads);
    kvtable::Errors(*threads);
  }
  return 0;
}
