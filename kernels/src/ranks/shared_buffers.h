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

  // At least so many bytes.
  std::shared_ptr<SharedBuffer> Take(int64_t bytes);

  // Lets go of those that nobody has had for so long.
  Idle DropIdle(Clock::duration idle_for);

  // See SharedExchange::Holding.
  std::shared_ptr<SharedBuffer> Holding(const char* data, int64_t bytes) const;

 private:
  struct Free {
    std::unique_ptr<SharedBuffer> buffer;
    Clock::time_point since;
  };

  void GiveBack(SharedBuffer* buffer);

  mutable std::mutex mutex_;
  uint64_t next_number_ = 0;
  std::vector<Free> free_;
  std::map<const char*, std::weak_ptr<SharedBuffer>> taken_;  // by where they begin
};

}  // namespace kvtable
