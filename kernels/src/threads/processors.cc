#include "threads/processors.h"

#include <sched.h>
#include <unistd.h>

#include <array>
#include <cstddef>

namespace kvtable {
namespace {

// The processors that the process may use, numbered. One that it may not, and has all the same, counts as its number.
struct Processors {
  Processors() {
    cpu_set_t allowed;
    const bool known = sched_getaffinity(getpid(), sizeof(allowed), &allowed) == 0;
    for (size_t cpu = 0; cpu < places.size(); ++cpu) {
      const bool counts = known && CPU_ISSET(cpu, &allowed);
      places[cpu] = static_cast<uint32_t>(counts ? count : cpu);
      count += counts ? 1 : 0;
    }
    if (count == 0) count = 1;
  }

  std::array<uint32_t, CPU_SETSIZE> places;
  uint64_t count = 0;
};

}  // namespace

uint64_t PlaceOfProcessor(uint64_t count) {
  static const Processors processors;
  const int cpu = sched_getcpu();
  if (cpu < 0 || static_cast<size_t>(cpu) >= processors.places.size()) return 0;
  return processors.places[static_cast<size_t>(cpu)] % processors.count * count / processors.count;
}

}  // namespace kvtable
