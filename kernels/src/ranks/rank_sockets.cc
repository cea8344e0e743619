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

constexpr size_t kMostBytes = 128 << 10;  // of a message

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

RankSockets::RankSockets(int rank, std::vector<int> sockets)
    : rank_(rank), sockets_(std::move(sockets)), unsent_(sockets_.size()), received_(kMostBytes) {
  sockets_[static_cast<size_t>(rank)] = -1;
  for (const int socket : sockets_) {
    if (socket >= 0) SocketsOfChildren::Get().Add(socket);
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ >= 0) return;
  const std::string why = std::strerror(errno);
  for (size_t r = 0; r < sockets_.size(); ++r) Close(static_cast<int>(r));
  throw Error(ErrorCode::kResourceExhausted, "no event for messages of ranks: " + why);
}

RankSockets::~RankSockets() {
  for (size_t r = 0; r < sockets_.size(); ++r) Close(static_cast<int>(r));
  close(wake_);
}

void RankSockets::Send(int rank, std::string bytes, int file) {
  if (bytes.size() > kMostBytes) {
    throw Error(ErrorCode::kInvalidArgument, "a message to a rank has " + std::to_string(bytes.size()) +
                                                 " bytes, of which " + std::to_string(kMostBytes) +
                                                 " may be: give the exchange a shorter name");
  }
  if (is_gone(rank)) return;
  std::deque<Message>& unsent = unsent_[static_cast<size_t>(rank)];
  Message message{std::move(bytes), file};
  if (unsent.empty() && SendNow(rank, message)) return;
  unsent.push_back(std::move(message));
  Wake();
}

bool RankSockets::SendNow(int rank, const Message& message) {
  iovec part{const_cast<char*>(message.bytes.data()), message.bytes.size()};
  msghdr head{};
  head.msg_iov = &part;
  head.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (message.file >= 0) {
    head.msg_control = control;
    head.msg_controllen = sizeof control;
    cmsghdr* const file = CMSG_FIRSTHDR(&head);
    file->cmsg_level = SOL_SOCKET;
    file->cmsg_type = SCM_RIGHTS;
    file->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(file), &message.file, sizeof(int));
  }
  while (sendmsg(sockets_[static_cast<size_t>(rank)], &head, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // No memory, or too many files on their way: for now.
    return errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS && errno != ENOMEM &&
           errno != ETOOMANYREFS;
  }
  return true;  // or there is nobody, which Receive finds out
}

std::vector<pollfd> RankSockets::Awaited() const {
  std::vector<pollfd> awaited{{wake_, POLLIN, 0}};
  for (size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] < 0) continue;
    const short room = unsent_[r].empty() ? 0 : POLLOUT;
    awaited.push_back({sockets_[r], static_cast<short>(POLLIN | room), 0});
  }
  return awaited;
}

void RankSockets::Wait(std::vector<pollfd> awaited, int milliseconds) {
  poll(awaited.data(), awaited.size(), milliseconds);
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
    while (!is_gone(rank) && !unsent_[r].empty() && SendNow(rank, unsent_[r].front())) unsent_[r].pop_front();
  }
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
  int file = -1;
  if (const cmsghdr* const with = CMSG_FIRSTHDR(&head); with != nullptr && with->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&file, CMSG_DATA(with), sizeof file);
  }
  receiver->Received(rank, received_.data(), static_cast<size_t>(size), file);
  return true;
}

void RankSockets::Close(int rank) {
  int& socket = sockets_[static_cast<size_t>(rank)];
  if (socket >= 0) SocketsOfChildren::Get().Close(socket);
  socket = -1;
  unsent_[static_cast<size_t>(rank)].clear();
}

}  // namespace kvtable
