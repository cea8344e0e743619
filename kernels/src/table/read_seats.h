// Who reads which shards, told without writing to the shards.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "threads/backoff.h"

namespace kvtable {

// A block of a lookup reads nearly all shards of a table. Were it counted in the lock of each, it would write every
// lock twice, and processors that look up at the same time would pass these cache lines on to one another all the
// time: the more of them, and the more shards, the longer a block takes. So a block takes a seat, a line of its own, and
// writes down in one word which shards it reads; a writer, of which there are fewer, looks at all seats. Both write
// first and read the other's word then, and these accesses are in one order for all threads, so one of the two sees
// the other: a reader goes without the shards that a writer keeps, and a writer waits for those who read its shard.
class ReadSeats {
 public:
  struct alignas(64) Seat {
    std::atomic<uint64_t> shards{0};  // a bit for each that is read; 0: nobody sits here
  };

  ReadSeats() : seats_(Count()) {}

  // Takes a seat to read `shards`: `*got` of them, those that no writer keeps. Null where none was found free, or where
  // it would get nothing; then it has none.
  Seat* Take(uint64_t shards, uint64_t* got) {
    const size_t first = static_cast<size_t>(sched_getcpu());
    for (size_t i = 0; i < kTried; ++i) {
      Seat& seat = seats_[(first + i) % seats_.size()];
      uint64_t nobody = 0;
      if (seat.shards.load(std::memory_order_relaxed) != 0 ||
          !seat.shards.compare_exchange_strong(nobody, shards, std::memory_order_seq_cst)) {
        continue;
      }
      *got = shards & ~kept_.load(std::memory_order_seq_cst);
      if (*got != shards) seat.shards.store(*got, std::memory_order_release);
      return *got == 0 ? nullptr : &seat;
    }
    *got = 0;
    return nullptr;
  }
  void Leave(Seat* seat) {
    const uint64_t shards = seat->shards.load(std::memory_order_relaxed);
    seat->shards.store(0, std::memory_order_release);
    // A writer waits for one of them. Where threads outnumber CPUs, it may be waiting for this CPU, too.
    if ((kept_.load(std::memory_order_relaxed) & shards) != 0) sched_yield();
  }

  // For a writer: keeps readers off a shard, and waits for those that are at it. Whether it had to wait.
  bool Keep(uint64_t shard) {
    kept_.fetch_or(shard, std::memory_order_seq_cst);
    bool waited = false;
    for (const Seat& seat : seats_) {
      for (Backoff backoff; (seat.shards.load(std::memory_order_seq_cst) & shard) != 0; backoff.Wait()) {
        waited = true;
      }
    }
    return waited;
  }
  void LetGo(uint64_t shard) { kept_.fetch_and(~shard, std::memory_order_release); }

 private:
  static constexpr size_t kTried = 8;  // seats, before it is given up

  // Two for each CPU: who was interrupted keeps its seat.
  static size_t Count() {
    cpu_set_t cpus;
    const int count = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    size_t seats = kTried;
    while (seats < 2 * static_cast<size_t>(count) && seats < 256) seats *= 2;
    return seats;
  }

  std::vector<Seat> seats_;
  alignas(64) std::atomic<uint64_t> kept_{0};  // a bit for each shard that a writer has, or is about to have
};

}  // namespace kvtable
