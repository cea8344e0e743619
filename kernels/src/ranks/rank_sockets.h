// The sockets of a rank to the others: messages that have a file with them, or none.
#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <string>
#include <vector>

namespace kvtable {

// Not synchronized: one thread waits and receives, any may send, under a lock that Wait does not need.
class RankSockets {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kNoFile = -1;
  static constexpr int kFileNotTaken = -2;  // this process may open no more

  // What to do with what comes. A file is the callee's to close.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void Received(int rank, const char* bytes, size_t size, int file) = 0;
    virtual void Gone(int rank) = 0;
  };

  // What Wait is to wait for.
  struct Awaited {
    std::vector<pollfd> events;
    bool try_again = false;  // no event says when what is held up can be sent
  };

  // sockets[r]: to rank r; closed with this object. Nothing at [rank]. The system bounds the files on their way and
  // the memory of messages: what it has not taken for so long is given up. Throws Error(kResourceExhausted).
  RankSockets(int rank, std::vector<int> sockets, Clock::duration patience);
  ~RankSockets();
  RankSockets(const RankSockets&) = delete;
  RankSockets& operator=(const RankSockets&) = delete;

  // At once, or by Receive once the socket has room. `file`, if any, is open until then; a message whose file was given
  // up goes without it. To a rank that has gone: nowhere.
  void Send(int rank, std::string bytes, int file = kNoFile);

  // Room for what could not be sent, and, where that is wanted, something to come, or Wake.
  Awaited ToAwait(bool to_receive) const;
  static void Wait(Awaited awaited, int milliseconds);
  void Wake();

  // What has come since, and what could not be sent before.
  void Receive(Receiver* receiver);

  void SendUnsent();
  bool has_unsent() const;

  bool is_gone(int rank) const { return sockets_[static_cast<size_t>(rank)] < 0; }
  // Why this rank ended the connection; empty where it did not.
  const std::string& why_gone(int rank) const { return why_gone_[static_cast<size_t>(rank)]; }
  // All that are left; what is unsent is dropped.
  void Close();

 private:
  struct Message {
    std::string bytes;
    int file;
    size_t sent = 0;  // bytes
  };
  // That the system takes nothing, though there is room.
  struct HeldUp {
    bool is_now = false;
    int error = 0;
    Clock::time_point since{}, last{};
  };

  bool SendNow(int rank, Message* message);  // false: there is no room
  bool IsToBeTriedAgain(int error, HeldUp* held_up) const;
  // Whether to go on with it, by now without its file.
  bool GiveUp(int rank, Message* message, int error);
  bool ReceiveOne(int rank, Receiver* receiver);  // false: nothing more has come
  void Close(int rank);

  const int rank_;
  const Clock::duration patience_;
  int wake_ = -1;
  std::vector<int> sockets_;
  std::vector<std::deque<Message>> unsent_;
  std::vector<HeldUp> held_up_;
  std::vector<std::string> why_gone_;
  std::vector<char> received_;        // a piece
  std::vector<std::string> unended_;  // by rank: the pieces of a message that has not come to its end
};

}  // namespace kvtable
