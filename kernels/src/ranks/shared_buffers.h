// The memory of a process that other ranks can map: taken for what is sent, given back, and taken again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtable/shared_exchange.h"

namespace kvtable {

class SharedBuffers : public std::enable_shared_from_this<SharedBuffers> {
 public:
  using Idle = std::vector<std::unique_ptr<SharedBuffer>>;

  // At least so many bytes. `idle` gets those that nobody has wanted for a while: they are no longer here.
  std::shared_ptr<SharedBuffer> Take(int64_t bytes, Idle* idle);

  // All that nobody has at the moment.
  Idle DropAll();

  // See SharedExchange::Holding.
  std::shared_ptr<SharedBuffer> Holding(const char* data, int64_t bytes) const;

 private:
  struct Free {
    std::unique_ptr<SharedBuffer> buffer;
    uint64_t since;  // how many had been taken
  };

  void GiveBack(SharedBuffer* buffer);
  // Those that were given back when so many had been taken, or earlier.
  void Drop(uint64_t since, Idle* idle);

  mutable std::mutex mutex_;
  uint64_t taken_count_ = 0;
  uint64_t next_number_ = 0;
  std::vector<Free> free_;
  std::map<const char*, std::weak_ptr<SharedBuffer>> taken_;  // by where they begin
};

}  // namespace kvtable
