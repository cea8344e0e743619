// The memory of a process that other ranks can map: taken for what is sent, given back, and taken again.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/shared_exchange.h"

namespace kvtable {

class SharedBuffers : public std::enable_shared_from_this<SharedBuffers> {
 public:
  using Clock = std::chrono::steady_clock;
  using Idle = std::vector<std::unique_ptr<SharedBuffer>>;

  // Buffers that nobody has taken for so long are let go of.
  explicit SharedBuffers(Clock::duration idle_after) : idle_after_(idle_after) {}

  // At least so many bytes. `idle` gets those that are let go of.
  std::shared_ptr<SharedBuffer> Take(int64_t bytes, Idle* idle);

  // All that nobody has at the moment.
  Idle DropAll();

  // See SharedExchange::Holding.
  std::shared_ptr<SharedBuffer> Holding(const char* data, int64_t bytes) const;

 private:
  struct Free {
    std::unique_ptr<SharedBuffer> buffer;
    Clock::time_point since;
  };

  void GiveBack(SharedBuffer* buffer);
  // Those that were given back by then.
  void Drop(Clock::time_point since, Idle* idle);

  const Clock::duration idle_after_;
  mutable std::mutex mutex_;
  uint64_t next_number_ = 0;
  std::vector<Free> free_;
  std::map<const char*, std::weak_ptr<SharedBuffer>> taken_;  // by where they begin
};

}  // namespace kvtable
