// Sends requests over kept connections to 127.0.0.1 and says how long the answers took, as one line of JSON.
//
//   load PORT REQUESTS http|resp CONNECTIONS SECONDS [RATE even|poisson]
//
// REQUESTS is a file: a line with the number of requests, a line "BYTES REPLIES" for each, and their bytes. They are sent
// in turn, round and round. Without RATE every connection has one request under way at any time. With RATE a request is
// due at fixed (or Poisson) times, whatever became of those before it, and its time counts from when it was due: one that
// waits for a free connection has begun.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr double kWarmUp = 0.1;
constexpr double kPatience = 5;  // more seconds, until what is under way or must be is answered
constexpr size_t kLeast = 2;     // requests of each connection, so that slow ones are measured, too

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "load: %s\n", why.c_str());
  std::exit(1);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Request {
  std::string bytes;
  int64_t replies;
};

std::vector<Request> ReadRequests(const char* path) {
  std::ifstream file(path, std::ios::binary);
  size_t count = 0;
  file >> count;
  std::vector<std::pair<size_t, int64_t>> sizes(count);
  for (auto& [bytes, replies] : sizes) file >> bytes >> replies;
  file.get();
  std::vector<Request> requests;
  for (const auto& [bytes, replies] : sizes) {
    requests.push_back({std::string(bytes, '\0'), replies});
    file.read(requests.back().bytes.data(), static_cast<std::streamsize>(bytes));
  }
  if (!file || requests.empty()) Fail(std::string("cannot read ") + path);
  return requests;
}

// Finds the end of an answer in bytes that come in pieces.
class Answer {
 public:
  explicit Answer(bool http) : http_(http) {}

  void Begin(int64_t replies) {
    state_ = State::kLine;
    line_.clear();
    skip_ = 0;
    left_ = replies;
    chunked_ = first_ = false;
    if (http_) state_ = State::kHead;
  }

  // Takes bytes; true once the answer is whole.
  bool Take(std::string_view bytes) {
    while (!bytes.empty()) {
      if (state_ == State::kBody) {
        const size_t some = std::min<size_t>(bytes.size(), static_cast<size_t>(skip_));
        bytes.remove_prefix(some);
        skip_ -= static_cast<int64_t>(some);
        if (skip_ == 0 && AfterBody()) return true;
        continue;
      }
      const size_t end = bytes.find('\n');
      line_.append(bytes.substr(0, end));
      if (end == std::string_view::npos) return false;
      bytes.remove_prefix(end + 1);
      if (!line_.empty() && line_.back() == '\r') line_.pop_back();
      const bool whole = http_ ? HttpLine() : RespLine();
      line_.clear();
      if (whole) return true;
    }
    return false;
  }

 private:
  enum class State { kHead, kLine, kBody, kTrailer };

  bool HttpLine() {
    if (state_ == State::kTrailer) return line_.empty();
    if (state_ == State::kLine) {  // the size of a chunk
      skip_ = std::strtoll(line_.c_str(), nullptr, 16);
      if (skip_ == 0) {
        state_ = State::kTrailer;
      } else {
        skip_ += 2;
        state_ = State::kBody;
      }
      return false;
    }
    if (!first_) {
      first_ = true;
      if (line_.compare(0, 12, "HTTP/1.1 200") != 0) Fail("the server answered: " + line_);
      return false;
    }
    if (!line_.empty()) {
      for (char& c : line_) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      if (line_.compare(0, 15, "content-length:") == 0) skip_ = std::strtoll(line_.c_str() + 15, nullptr, 10);
      if (line_.compare(0, 18, "transfer-encoding:") == 0) chunked_ = true;
      return false;
    }
    state_ = chunked_ ? State::kLine : State::kBody;
    return !chunked_ && skip_ == 0;
  }

  bool RespLine() {
    if (line_.empty()) Fail("an empty line where a reply should begin");
    const int64_t number = std::strtoll(line_.c_str() + 1, nullptr, 10);
    switch (line_[0]) {
      case '-':
        Fail("the server answered: " + line_);
      case '*':
        left_ += number - 1;
        return left_ == 0;
      case '$':
        if (number >= 0) {
          skip_ = number + 2;
          state_ = State::kBody;
          return false;
        }
        [[fallthrough]];
      default:
        return --left_ == 0;
    }
  }

  bool AfterBody() {
    if (http_ && !chunked_) return true;
    state_ = State::kLine;
    return !http_ && --left_ == 0;
  }

  const bool http_;
  State state_ = State::kHead;
  std::string line_;
  int64_t skip_ = 0;
  int64_t left_ = 0;
  bool chunked_ = false;
  bool first_ = false;
};

struct Connection {
  Connection(int descriptor, bool http) : fd(descriptor), answer(http) {}
  int fd;
  Answer answer;
  const Request* request = nullptr;  // under way, or none
  size_t sent = 0;
  double due = 0;
};

void Send(Connection& connection) {
  const std::string& bytes = connection.request->bytes;
  while (connection.sent < bytes.size()) {
    const ssize_t some =
        send(connection.fd, bytes.data() + connection.sent, bytes.size() - connection.sent, MSG_NOSIGNAL);
    if (some < 0 && errno == EAGAIN) return;
    if (some < 0) Fail(std::string("sending: ") + std::strerror(errno));
    connection.sent += static_cast<size_t>(some);
  }
}

int Connect(int port, int poll, size_t number) {
  const int fd = socket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    Fail(std::string("connecting: ") + std::strerror(errno));
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, O_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLET;
  event.data.u64 = number;
  epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
  return fd;
}

double Percentile(const std::vector<double>& sorted, double part) {
  if (sorted.empty()) return 0;
  return sorted[std::min(sorted.size() - 1, static_cast<size_t>(part * static_cast<double>(sorted.size())))];
}

}  // namespace

int main(int count, char** words) {
  if (count != 6 && count != 8)
    Fail("usage: load PORT REQUESTS http|resp CONNECTIONS SECONDS [RATE even|poisson]");
  const std::vector<Request> requests = ReadRequests(words[2]);
  const bool http = std::string_view(words[3]) == "http";
  const size_t wanted = std::strtoull(words[4], nullptr, 10);
  const double seconds = std::strtod(words[5], nullptr);
  const double rate = count == 8 ? std::strtod(words[6], nullptr) : 0;
  const bool poisson = count == 8 && std::string_view(words[7]) == "poisson";
  std::mt19937_64 random(1);
  std::exponential_distribution<double> gaps(rate > 0 ? rate : 1);

  const int poll = epoll_create1(0);
  std::vector<Connection> connections;
  for (size_t i = 0; i < wanted; ++i) connections.emplace_back(Connect(std::atoi(words[1]), poll, i), http);

  std::vector<double> times;
  std::vector<size_t> free;
  std::deque<double> waiting;
  std::vector<char> buffer(1 << 20);
  std::vector<epoll_event> events(wanted);
  size_t next = 0;
  int64_t all = 0, counted = 0, bytes = 0;
  const double begin = Now(), from = begin + kWarmUp, until = from + seconds;
  double due = begin, ended = 0, longest_wait = 0;

  const auto start = [&](size_t number, double at) {
    Connection& connection = connections[number];
    connection.request = &requests[next++ % requests.size()];
    connection.sent = 0;
    connection.due = at;
    connection.answer.Begin(connection.request->replies);
    Send(connection);
  };
  for (size_t i = 0; i < wanted; ++i) {
    if (rate > 0) {
      free.push_back(i);
    } else {
      start(i, Now());
    }
  }
  for (;;) {
    double now = Now();
    if (rate > 0) {
      for (; due <= now && due < until; due += poisson ? gaps(random) : 1 / rate) waiting.push_back(due);
      while (!waiting.empty() && !free.empty()) {
        longest_wait = std::max(longest_wait, now - waiting.front());
        start(free.back(), waiting.front());
        free.pop_back();
        waiting.pop_front();
      }
      if (now >= until && waiting.empty() && free.size() == wanted) break;
    } else if (now >= until && times.size() >= kLeast * wanted) {
      break;
    }
    if (now >= until + kPatience) break;
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), rate > 0 ? 0 : 1000);
    for (int i = 0; i < ready; ++i) {
      const size_t number = events[static_cast<size_t>(i)].data.u64;
      Connection& connection = connections[number];
      if (connection.request == nullptr) continue;
      Send(connection);
      while (connection.request != nullptr) {
        const ssize_t got = recv(connection.fd, buffer.data(), buffer.size(), 0);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) Fail("the server closed a connection");
        bytes += got;
        if (!connection.answer.Take({buffer.data(), static_cast<size_t>(got)})) continue;
        now = Now();
        ++all;
        if (now >= from) ++counted;
        connection.request = nullptr;
        if (rate > 0) {
          if (connection.due >= from) times.push_back(now - connection.due);
          free.push_back(number);
        } else {
          if (connection.due >= from) times.push_back(now - connection.due);
          start(number, now);
        }
      }
    }
  }
  ended = Now();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double cpu = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"requests\": %lld, \"seconds\": %.6f, \"p50\": %.9f, \"p90\": %.9f, \"p99\": %.9f, \"p999\": %.9f, "
      "\"max\": %.9f, \"all\": %lld, \"bytes\": %lld, \"generator_cpu\": %.6f, \"longest_wait\": %.9f, "
      "\"unanswered\": %zu}\n",
      static_cast<long long>(counted), ended - from, Percentile(times, 0.5), Percentile(times, 0.9),
      Percentile(times, 0.99), Percentile(times, 0.999), times.empty() ? 0 : times.back(),
      static_cast<long long>(all), static_cast<long long>(bytes), cpu, longest_wait,
      rate > 0 ? waiting.size() + wanted - free.size() : size_t{0});
  return 0;
}
