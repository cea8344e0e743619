#include "ranks/rank_sockets.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

// A message goes in pieces that fit into the smallest buffer which a socket can have. Before each piece:
constexpr char kMore = 1;  // another one follows
constexpr char kLast = 0;
constexpr size_t kPieceBytes = 4000;

constexpr int kTryAgainMs = 10;
// What is held up again so soon is held up still: messages that wait one behind the other are not waited for each.
constexpr std::chrono::seconds kOneHoldUp{1};

// A child that a process forks has its sockets, too, and would keep them open when the process has ended, so
// that nobody knew: it closes them.
class SocketsOfChildren {
 public:
  static SocketsOfChildren& Get() {
    static SocketsOfChildren* const all = new SocketsOfChildren;  // there as long as the process
    return *all;
  }

  void Add(int socket) {
    const std::lock_guard<std::mutex> hold(mutex_);
    sockets_.push_back(socket);
  }
  void Close(int socket) {
    const std::lock_guard<std::mutex> hold(mutex_);
    const auto it = std::find(sockets_.begin(), sockets_.end(), socket);
    if (it == sockets_.end()) return;  // this is a child
    sockets_.erase(it);
    close(socket);
  }

 private:
  SocketsOfChildren() {
    pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                   [] {
                     for (const int socket : Get().sockets_) close(socket);
                     Get().sockets_.clear();  // their numbers are free for other files
                     Get().mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  std::vector<int> sockets_;
};

}  // namespace

RankSockets::RankSockets(int rank, std::vector<int> sockets, Clock::duration patience)
    : rank_(rank),
      patience_(patience),
      sockets_(std::move(sockets)),
      unsent_(sockets_.size()),
      held_up_(sockets_.size()),
      why_gone_(sockets_.size()),
      received_(1 + kPieceBytes),
      unended_(sockets_.size()) {
  sockets_[static_cast<size_t>(rank)] = -1;
  for (const int socket : sockets_) {
    if (socket >= 0) SocketsOfChildren::Get().Add(socket);
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ >= 0) return;
  const std::string why = std::strerror(errno);
  Close();
  throw Error(ErrorCode::kResourceExhausted, "no event for messages of ranks: " + why);
}

RankSockets::~RankSockets() {
  Close();
  close(wake_);
}

void RankSockets::Send(int rank, std::string bytes, int file) {
  if (is_gone(rank)) return;
  std::deque<Message>& unsent = unsent_[static_cast<size_t>(rank)];
  Message message{std::move(bytes), file};
  if (unsent.empty() && SendNow(rank, &message)) return;
  unsent.push_back(std::move(message));
  Wake();
}

bool RankSockets::SendNow(int rank, Message* message) {
  HeldUp& held_up = held_up_[static_cast<size_t>(rank)];
  bool is_last;
  do {
    const size_t bytes = std::min(message->bytes.size() - message->sent, kPieceBytes);
    is_last = message->sent + bytes == message->bytes.size();
    char more = is_last ? kLast : kMore;
    iovec parts[] = {{&more, 1}, {message->bytes.data() + message->sent, bytes}};
    msghdr head{};
    head.msg_iov = parts;
    head.msg_iovlen = 2;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (is_last && message->file >= 0) {
      head.msg_control = control;
      head.msg_controllen = sizeof control;
      cmsghdr* const file = CMSG_FIRSTHDR(&head);
      file->cmsg_level = SOL_SOCKET;
      file->cmsg_type = SCM_RIGHTS;
      file->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(file), &message->file, sizeof(int));
    }
    while (sendmsg(sockets_[static_cast<size_t>(rank)], &head, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
      const int error = errno;
      if (error == EINTR) continue;
      held_up.is_now = IsToBeTriedAgain(error, &held_up);
      if (held_up.is_now || error == EAGAIN || error == EWOULDBLOCK) return false;
      if (error == EPIPE || error == ECONNRESET) return true;  // there is nobody, which Receive finds out
      if (!GiveUp(rank, message, error)) return true;
      head.msg_control = nullptr;
      head.msg_controllen = 0;
    }
    held_up.is_now = false;
    // That a message without a file went says nothing of the next that has one.
    if (held_up.error != ETOOMANYREFS || head.msg_control != nullptr) held_up.last = {};
    message->sent += bytes;
  } while (!is_last);
  return true;
}

bool RankSockets::IsToBeTriedAgain(int error, HeldUp* held_up) const {
  if (error != ENOBUFS && error != ENOMEM && error != ETOOMANYREFS) return false;
  const auto now = Clock::now();
  if (now - held_up->last > kOneHoldUp) held_up->since = now;
  held_up->last = now;
  held_up->error = error;
  return now - held_up->since < patience_;
}

bool RankSockets::GiveUp(int rank, Message* message, int error) {
  if (error == ETOOMANYREFS && message->file >= 0) {
    message->file = kNoFile;
    return true;
  }
  // The messages after it would be taken for others: there are none, and both ranks know.
  why_gone_[static_cast<size_t>(rank)] = "a message of " + std::to_string(message->bytes.size()) +
                                         " bytes cannot be sent to it (" + std::strerror(error) + ")";
  shutdown(sockets_[static_cast<size_t>(rank)], SHUT_RDWR);
  return false;
}

RankSockets::Awaited RankSockets::ToAwait(bool to_receive) const {
  Awaited awaited;
  const short anything = to_receive ? POLLIN : 0;
  if (to_receive) awaited.events.push_back({wake_, POLLIN, 0});
  for (size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] < 0) continue;
    short events = anything;
    if (!unsent_[r].empty() && held_up_[r].is_now) {
      awaited.try_again = true;
    } else if (!unsent_[r].empty()) {
      events |= POLLOUT;
    }
    if (events != 0) awaited.events.push_back({sockets_[r], events, 0});
  }
  return awaited;
}

void RankSockets::Wait(Awaited awaited, int milliseconds) {
  if (awaited.try_again) milliseconds = std::min(milliseconds, kTryAgainMs);
  poll(awaited.events.data(), awaited.events.size(), milliseconds);
}

void RankSockets::Wake() {
  const uint64_t once = 1;
  [[maybe_unused]] const ssize_t done = write(wake_, &once, sizeof once);  // full: it is awake
}

void RankSockets::Receive(Receiver* receiver) {
  uint64_t times;
  [[maybe_unused]] const ssize_t done = read(wake_, &times, sizeof times);
  for (size_t r = 0; r < sockets_.size(); ++r) {
    const int rank = static_cast<int>(r);
    while (!is_gone(rank) && ReceiveOne(rank, receiver)) {
    }
  }
  SendUnsent();
}

void RankSockets::SendUnsent() {
  for (size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] < 0) continue;
    std::deque<Message>& unsent = unsent_[r];
    while (!unsent.empty() && SendNow(static_cast<int>(r), &unsent.front())) unsent.pop_front();
  }
}

bool RankSockets::has_unsent() const {
  return std::any_of(unsent_.begin(), unsent_.end(), [](const auto& of) { return !of.empty(); });
}

bool RankSockets::ReceiveOne(int rank, Receiver* receiver) {
  iovec part{received_.data(), received_.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr head{};
  head.msg_iov = &part;
  head.msg_iovlen = 1;
  head.msg_control = control;
  head.msg_controllen = sizeof control;
  const auto receive = [&] {
    return recvmsg(sockets_[static_cast<size_t>(rank)], &head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  };
  ssize_t size = receive();
  // That it has left messages of this rank unread is said first, once, and what it has sent comes then.
  if (size < 0 && errno == ECONNRESET) size = receive();
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (size < 0 && errno == EINTR) return true;
  if (size <= 0) {
    Close(rank);
    receiver->Gone(rank);
    return false;
  }
  int file = (head.msg_flags & MSG_CTRUNC) != 0 ? kFileNotTaken : kNoFile;
  if (const cmsghdr* const with = CMSG_FIRSTHDR(&head); with != nullptr && with->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&file, CMSG_DATA(with), sizeof file);
  }
  std::string& unended = unended_[static_cast<size_t>(rank)];
  const char* const piece = received_.data() + 1;
  const size_t bytes = static_cast<size_t>(size) - 1;
  if (received_[0] == kMore) {
    unended.append(piece, bytes);
  } else if (unended.empty()) {
    receiver->Received(rank, piece, bytes, file);
  } else {
    unended.append(piece, bytes);
    const std::string whole = std::exchange(unended, {});
    receiver->Received(rank, whole.data(), whole.size(), file);
  }
  return true;
}

void RankSockets::Close() {
  for (size_t r = 0; r < sockets_.size(); ++r) Close(static_cast<int>(r));
}

void RankSockets::Close(int rank) {
  int& socket = sockets_[static_cast<size_t>(rank)];
  if (socket >= 0) SocketsOfChildren::Get().Close(socket);
  socket = -1;
  unsent_[static_cast<size_t>(rank)].clear();
}

}  // namespace kvtable
