// Where threads begin: each processor at a place of its own, far from the others', whatever their numbers are.
#include "threads/processors.h"

#include <sched.h>

#include <cstdint>
#include <set>
#include <vector>

#include "check.h"

int main() {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  CHECK(kvtable::PlaceOfProcessor(1) == 0);
  const uint64_t count = 64;
  std::set<uint64_t> places;
  for (size_t i = 0; i < cpus.size(); ++i) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[i], &one);
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    const uint64_t place = kvtable::PlaceOfProcessor(count);
    CHECK(place == i * count / cpus.size());
    CHECK(kvtable::PlaceOfProcessor(count) == place);
    CHECK(kvtable::PlaceOfProcessor(1) == 0);
    places.insert(place);
  }
  CHECK(places.size() == (cpus.size() < count ? cpus.size() : count));
  return 0;
}
