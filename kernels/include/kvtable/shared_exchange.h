// Exchanges among processes of one machine, the ranks of a job, through memory that they share.
//
// Each rank has a socket to every other one, and memory that the others can map. It says over the sockets
// what it sends: in which exchange, and where the part for each lies. Who receives reads it there, and says
// when it has. So bytes are not copied on the way, and nobody waits but for the rank whose part is missing.
// Where memory is new to some rank, all wait until each has said that it has mapped it, or all fail.
// Where a process ends, its sockets do, and the others know.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvtable {

// Memory that the other ranks can read. It goes back to its exchange, for what is sent next, with its last
// owner.
class SharedBuffer {
 public:
  SharedBuffer(uint64_t number, int64_t bytes);  // throws Error(kResourceExhausted)
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  uint64_t number() const { return number_; }
  int file() const { return file_; }  // -1 once it is closed
  // Those who have the file map it, and this process needs it no more.
  void CloseFile();

 private:
  const uint64_t number_;
  const int64_t bytes_;
  int file_ = -1;
  char* data_ = nullptr;
};

struct ExchangeFailure {
  enum class Kind {
    kRankLost,    // its process has ended
    kStalled,     // for longer than is to be waited
    kOtherKind,   // a rank sends something else
    kCancelled,   // by this rank
    kNoResource,  // a rank has no memory, or no file descriptor
  };
  Kind kind;
  std::string what;
};

class SharedExchange {
 public:
  struct Options {
    std::chrono::milliseconds warn_after{60000};  // of waiting, and as long after the last; 0: never
    std::chrono::milliseconds fail_after{0};      // 0: never
    std::function<void(const std::string&)> warn;
    // Memory that nothing was sent from for so long is given back.
    std::chrono::milliseconds idle_after{60000};
    // What the system has not taken for so long, as too many files are on their way, fails.
    std::chrono::milliseconds held_up_for{10000};
    // For so long, at most, the end waits until the others take what was sent to them.
    std::chrono::milliseconds last_words_for{5000};
  };

  // What a rank sent to this one.
  struct Piece {
    const char* data = nullptr;
    int64_t bytes = 0;
  };

  // The pieces of all ranks, which can be read until this goes.
  class Arrival {
   public:
    virtual ~Arrival() = default;
    std::vector<Piece> pieces;
  };

  // Called once for each that is started, by any thread, with what came or with why nothing did.
  using Ended = std::function<void(std::shared_ptr<const Arrival>, const ExchangeFailure*)>;

  // sockets[r]: of SOCK_SEQPACKET, to rank r, and now this object's; whatever for the rank itself.
  SharedExchange(int rank, std::vector<int> sockets, Options options);
  // What is under way fails. In a fork it does nothing: that has no thread and no sockets.
  ~SharedExchange();
  SharedExchange(const SharedExchange&) = delete;
  SharedExchange& operator=(const SharedExchange&) = delete;

  int ranks() const;
  // Whether every rank is there, and nothing under way, on this rank or, as it has heard, another. For tests.
  bool is_idle() const;
  // Whether this process is a fork of the one that made it: Take and Start throw Error(kFailedPrecondition).
  bool is_of_parent() const;

  // Returns when the others, or the system, have all that was sent, or after last_words_for.
  void AwaitSent();

  // At least so many bytes to send from, whatever is in them. Throws Error(kResourceExhausted).
  std::shared_ptr<SharedBuffer> Take(int64_t bytes);
  // What Take gave that has these bytes; null where they lie elsewhere.
  std::shared_ptr<SharedBuffer> Holding(const char* data, int64_t bytes) const;

  struct Sent {
    std::string name;                      // the same on all ranks, and of no other exchange under way;
                                           // what is behind " of " says which op of the graph it is
    std::string kind;                      // of what is sent, the same on all ranks
    std::vector<int64_t> bytes;            // for each rank, one after the other
    const char* data = nullptr;            // where they begin
    std::shared_ptr<SharedBuffer> buffer;  // that has them; may be null where there are none
    std::shared_ptr<void> owner;           // of the data: goes once all have read it
    std::string problem;  // why there is nothing to send: fails with kNoResource on all ranks
  };

  // Sends, and calls `ended` when every rank has sent its part. Ranks start exchanges of a name in the same
  // order, and those of different names in any. Returns what Cancel takes. Throws Error(kInvalidArgument) where
  // one of this name is under way.
  uint64_t Start(Sent sent, Ended ended);

  // Ends it for this rank with kCancelled, unless it has ended. What was sent counts for the others: their next
  // one of this name is this rank's next, too.
  void Cancel(uint64_t started);

 private:
  void RefuseFork() const;

  class State;
  const pid_t process_;
  const int rank_;
  std::shared_ptr<State> state_;
};

}  // namespace kvtable
