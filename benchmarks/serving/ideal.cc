// The least that a server can be: answers every request after the same time, whatever it asks, on 127.0.0.1.
//
//   ideal REQUEST_BYTES ANSWER_BYTES MICROSECONDS
//
// Prints its port. Requests are REQUEST_BYTES long each; an answer is one of HTTP with so many bytes of body, after so
// many microseconds of work. What load.cc measures of it under an open load is what the machine adds to any server: a
// processor that is taken away for some milliseconds, and the queue that has formed by the time it is back.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

void Work(double microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

void SendAll(int fd, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t some = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (some <= 0) return;  // the generator has ended
    sent += static_cast<size_t>(some);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) {
    std::fprintf(stderr, "usage: ideal REQUEST_BYTES ANSWER_BYTES MICROSECONDS\n");
    return 1;
  }
  const size_t length = std::strtoull(words[1], nullptr, 10);
  const std::string body(std::strtoull(words[2], nullptr, 10), 'x');
  const double microseconds = std::strtod(words[3], nullptr);
  const std::string answer =
      "HTTP/1.1 200 OK\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;

  const int listener = socket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 64) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::perror("ideal");
    return 1;
  }
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);

  const int poll = epoll_create1(0);
  const auto watch = [poll](int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
  };
  watch(listener);
  std::unordered_map<int, size_t> received;  // bytes of requests that are not answered
  std::vector<char> buffer(1 << 20);
  for (std::array<epoll_event, 64> events{};;) {
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < ready; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == listener) {
        const int accepted = accept(listener, nullptr, nullptr);
        const int on = 1;
        setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        received[accepted] = 0;
        watch(accepted);
        continue;
      }
      const ssize_t got = recv(fd, buffer.data(), buffer.size(), 0);
      if (got <= 0) {
        close(fd);
        continue;
      }
      size_t& bytes = received[fd] += static_cast<size_t>(got);
      for (; bytes >= length; bytes -= length) {
        Work(microseconds);
        SendAll(fd, answer);
      }
    }
  }
}
