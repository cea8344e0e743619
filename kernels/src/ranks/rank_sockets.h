// The sockets of a rank to the others: messages that have a file with them, or none.
#pragma once

#include <poll.h>

#include <deque>
#include <string>
#include <vector>

namespace kvtable {

// Not synchronized: one thread waits and receives, any may send, under a lock that Wait does not need.
class RankSockets {
 public:
  // What to do with what comes. A file is the callee's to close; -1: none came, or this process could not take it.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void Received(int rank, const char* bytes, size_t size, int file) = 0;
    virtual void Gone(int rank) = 0;
  };

  // sockets[r]: to rank r; closed with this object. Nothing at [rank]. Throws Error(kResourceExhausted).
  RankSockets(int rank, std::vector<int> sockets);
  ~RankSockets();
  RankSockets(const RankSockets&) = delete;
  RankSockets& operator=(const RankSockets&) = delete;

  // At once, or by Receive once the socket has room. `file`, if any, is open until then. To a rank that has gone:
  // nowhere.
  void Send(int rank, std::string bytes, int file = -1);

  // What Wait is to wait for: something to come, room for what could not be sent, or Wake.
  std::vector<pollfd> Awaited() const;
  static void Wait(std::vector<pollfd> awaited, int milliseconds);
  void Wake();

  // What has come since, and what could not be sent before.
  void Receive(Receiver* receiver);

  bool is_gone(int rank) const { return sockets_[static_cast<size_t>(rank)] < 0; }

 private:
  struct Message {
    std::string bytes;
    int file;
  };

  bool SendNow(int rank, const Message& message);  // false: there is no room
  bool ReceiveOne(int rank, Receiver* receiver);   // false: nothing more has come
  void Close(int rank);

  const int rank_;
  int wake_ = -1;
  std::vector<int> sockets_;
  std::vector<std::deque<Message>> unsent_;
  std::vector<char> received_;
};

}  // namespace kvtable
