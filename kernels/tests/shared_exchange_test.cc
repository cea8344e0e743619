// Exchanges among ranks through shared memory. Each rank is an object of this process, or a process.
#include "kvtable/shared_exchange.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kvtable/types.h"
#include "ranks/rank_sockets.h"
#include "throws.h"

namespace kvtable {
namespace {

using Kind = ExchangeFailure::Kind;

#ifdef KVTABLE_TEST_FEW_ROUNDS
constexpr int kRounds = 10;
#else
constexpr int kRounds = 50;
#endif

std::vector<std::vector<int>> SocketsOf(int ranks) {
  std::vector<std::vector<int>> sockets(static_cast<size_t>(ranks),
                                        std::vector<int>(static_cast<size_t>(ranks), -1));
  for (size_t a = 0; a < sockets.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  return sockets;
}

std::vector<std::unique_ptr<SharedExchange>> Ranks(int ranks, const SharedExchange::Options& options = {}) {
  std::vector<std::unique_ptr<SharedExchange>> all;
  const auto sockets = SocketsOf(ranks);
  for (int r = 0; r < ranks; ++r) {
    all.push_back(std::make_unique<SharedExchange>(r, sockets[static_cast<size_t>(r)], options));
  }
  return all;
}

// What an exchange gave.
struct Got {
  std::vector<std::string> parts;
  bool failed = false;
  ExchangeFailure failure{};
};

struct Running {
  std::future<Got> got;
  uint64_t number;
};

// Sends parts[r] to rank r.
Running Start(SharedExchange* from, const std::string& name, const std::vector<std::string>& parts,
              const std::string& kind = "bytes", std::shared_ptr<void> owner = nullptr) {
  SharedExchange::Sent sent{name, kind, {}, nullptr, nullptr, std::move(owner), ""};
  std::string all;
  for (const std::string& part : parts) {
    sent.bytes.push_back(static_cast<int64_t>(part.size()));
    all += part;
  }
  if (!all.empty()) {
    sent.buffer = from->Take(static_cast<int64_t>(all.size()));
    sent.data = sent.buffer->data();
    std::memcpy(sent.buffer->data(), all.data(), all.size());
    CHECK(from->Holding(sent.data, static_cast<int64_t>(all.size())) == sent.buffer);
    if (sent.owner == nullptr) sent.owner = sent.buffer;
  }
  const auto promise = std::make_shared<std::promise<Got>>();
  Running running{promise->get_future(), 0};
  running.number =
      from->Start(std::move(sent), [promise](const std::shared_ptr<const SharedExchange::Arrival>& arrival,
                                             const ExchangeFailure* failure) {
        Got got;
        if (failure != nullptr) {
          got.failed = true;
          got.failure = *failure;
        } else {
          for (const auto& piece : arrival->pieces)
            got.parts.emplace_back(piece.data, static_cast<size_t>(piece.bytes));
        }
        promise->set_value(std::move(got));
      });
  return running;
}

std::string PartOf(int from, int to, int round, size_t bytes) {
  const std::string what =
      std::to_string(from) + ">" + std::to_string(to) + " in " + std::to_string(round) + " ";
  if (bytes <= 2 * what.size()) return what.substr(0, bytes);
  return what + std::string(bytes - 2 * what.size(), static_cast<char>('a' + round % 26)) + what;
}

// What `from` sends to `to`: of many sizes, and sometimes nothing.
std::string PartOf(int from, int to, int round) {
  constexpr size_t kSizes[] = {0, 1, 100, 5000, 70000, 300000};
  return PartOf(from, to, round, kSizes[static_cast<size_t>(from * 7 + to * 3 + round) % 6]);
}

void EachRankGetsWhatTheOthersSend() {
  for (const int ranks : {1, 2, 3, 5}) {
    const auto all = Ranks(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        SharedExchange* const mine = all[static_cast<size_t>(r)].get();
        std::mt19937 random(static_cast<unsigned>(r));
        for (int round = 0; round < kRounds; ++round) {
          // Four at once, on each rank in an order of its own.
          std::vector<int> order{0, 1, 2, 3};
          std::shuffle(order.begin(), order.end(), random);
          std::vector<Running> running(4);
          for (const int e : order) {
            std::vector<std::string> parts;
            for (int to = 0; to < ranks; ++to) parts.push_back(PartOf(r, to, 4 * round + e));
            running[static_cast<size_t>(e)] = Start(mine, "exchange " + std::to_string(e), parts);
          }
          for (int e = 0; e < 4; ++e) {
            const Got got = running[static_cast<size_t>(e)].got.get();
            CHECK(!got.failed);
            for (int from = 0; from < ranks; ++from) {
              CHECK(got.parts[static_cast<size_t>(from)] == PartOf(from, r, 4 * round + e));
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& one : all) CHECK(one->is_idle());
  }
}

void WhatIsSentStaysUntilAllHaveReadIt() {
  const auto all = Ranks(2);
  std::weak_ptr<int> owner;
  std::shared_ptr<const SharedExchange::Arrival> kept;
  std::promise<void> came;
  SharedExchange::Sent sent{"x", "", {0, 0}, nullptr, nullptr, nullptr, ""};
  all[1]->Start(sent,
                [&](const std::shared_ptr<const SharedExchange::Arrival>& arrival, const ExchangeFailure*) {
                  kept = arrival;
                  came.set_value();
                });
  {
    const auto held = std::make_shared<int>();
    owner = held;
    CHECK(!Start(all[0].get(), "x", {"own", "other"}, "", held).got.get().failed);
  }
  came.get_future().wait();
  CHECK(!owner.expired() && std::memcmp(kept->pieces[0].data, "other", 5) == 0);
  kept.reset();
  for (int i = 0; i < 1000 && !owner.expired(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(owner.expired());
}

void BuffersAreUsedAgainAndGoWhenIdle() {
  SharedExchange::Options options;
  options.idle_after = std::chrono::milliseconds(1500);
  const auto all = Ranks(2, options);
  const auto buffers = [] {  // each is mapped by both ranks
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      count += line.find("memfd:kvtools") != std::string::npos;
    }
    return count / 2;
  };
  const auto turn = [&](size_t bytes) {
    Running one = Start(all[0].get(), "x", {"", PartOf(0, 1, 0, bytes)});
    Running other = Start(all[1].get(), "x", {PartOf(1, 0, 0, bytes), ""});
    CHECK(one.got.get().parts[1] == PartOf(1, 0, 0, bytes) &&
          other.got.get().parts[0] == PartOf(0, 1, 0, bytes));
  };
  for (int i = 0; i < 10; ++i) turn(size_t{256} << 10);
  const int before = buffers();
  for (size_t i = 0; i < 50; ++i) turn((size_t{256} << 10) - i * 1000);
  CHECK(buffers() <= before + 4);
  turn(size_t{4} << 20);
  turn(size_t{1} << 20);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    turn(1000);
  } while (buffers() > before + 2 && std::chrono::steady_clock::now() < end);
  CHECK(buffers() <= before + 2);
}

// A process that may have few open files sends from many buffers at once.
void BuffersNeedNoOpenFiles() {
  rlimit allowed;
  CHECK(getrlimit(RLIMIT_NOFILE, &allowed) == 0);
  const auto all = Ranks(3);
  rlimit few = allowed;
  few.rlim_cur = 128;
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  constexpr int kMany = 200;
  std::vector<Running> running;
  for (int i = 0; i < kMany; ++i) {
    running.push_back(Start(all[0].get(), std::to_string(i), {"", PartOf(0, 1, i, 50), PartOf(0, 2, i, 50)}));
    if (i % 16 != 0) continue;
    // The others have come so far: files on their way are few, too.
    std::vector<Running> turn;
    for (const auto& rank : all) turn.push_back(Start(rank.get(), "turn", {"", "", ""}));
    for (Running& one : turn) CHECK(!one.got.get().failed);
  }
  for (int i = 0; i < kMany; ++i) {
    for (int r : {1, 2}) {
      running.push_back(Start(all[static_cast<size_t>(r)].get(), std::to_string(i), {"", "", ""}));
    }
  }
  for (Running& one : running) CHECK(!one.got.get().failed);
  CHECK(setrlimit(RLIMIT_NOFILE, &allowed) == 0);
}

// Where a rank could not take a buffer, it gets it the next time.
void AFileThatIsLostIsSentAgain() {
  const auto all = Ranks(2);
  const std::shared_ptr<SharedBuffer> buffer = all[0]->Take(100);
  std::memcpy(buffer->data(), "what is sent", 12);
  const auto exchange = [&] {
    Running other = Start(all[1].get(), "x", {"", ""});
    SharedExchange::Sent sent{"x", "bytes", {0, 12}, buffer->data(), buffer, buffer, ""};
    std::promise<void> ended;
    all[0]->Start(std::move(sent), [&](const auto&, const ExchangeFailure*) { ended.set_value(); });
    ended.get_future().wait();
    return other.got.get();
  };
  rlimit before;
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  for (int i = 0; i < 3; ++i) {
    const Got got = exchange();
    CHECK(got.failed && got.failure.kind == Kind::kNoResource);
    CHECK(got.failure.what ==
          "exchange 'x': rank 1 cannot map what rank 0 sends: it has too many open files (see ulimit -n)");
  }
  CHECK(Throws(ErrorCode::kResourceExhausted, "ulimit -n", [&] { all[0]->Take(200); }));
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  Got got;
  for (int i = 0; i < 100; ++i) {  // what it lacks may be on its way
    got = exchange();
    if (!got.failed) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(!got.failed && got.parts[0] == "what is sent");
}

// What one rank cannot map no rank gets: it would fail alone, and the others wait for what it does next.
void WhatOneRankCannotMapFailsOnAll() {
  const auto all = Ranks(3);
  const auto exchange = [&](const std::string& name) {
    std::vector<Running> running;
    // Memory of rank 0 alone, for rank 1 alone.
    const std::string part = PartOf(0, 1, 0, 100);
    running.push_back(Start(all[0].get(), name, {"", part, ""}));
    for (const size_t r : {1, 2}) running.push_back(Start(all[r].get(), name, {"", "", ""}));
    std::vector<Got> got;
    for (Running& one : running) {
      CHECK(one.got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
      got.push_back(one.got.get());
    }
    CHECK(got[1].failed || got[1].parts[0] == part);
    return got;
  };
  rlimit before;
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const auto fresh = all[0]->Take(100);
  // A number below all that is free: what is open stays so, and nothing more may be.
  const rlimit few{static_cast<rlim_t>(fresh->file() + 1), before.rlim_max};
  std::vector<int> fill;
  for (int free = dup(0); free >= 0 && free < fresh->file(); free = dup(0)) fill.push_back(free);
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  SharedExchange::Sent sent{"y", "bytes", {0, 4, 0}, fresh->data(), fresh, fresh, ""};
  std::memcpy(fresh->data(), "what", 4);
  std::promise<std::string> why;
  all[0]->Start(std::move(sent), [&](const auto&, const ExchangeFailure* failure) {
    why.set_value(failure == nullptr ? "" : failure->what);
  });
  std::vector<Running> others;
  for (const size_t r : {1, 2}) others.push_back(Start(all[r].get(), "y", {"", "", ""}));
  const std::string told = why.get_future().get();
  CHECK(told ==
        "exchange 'y': rank 1 cannot map what rank 0 sends: it has too many open files (see ulimit -n)");
  for (Running& one : others) {
    const Got got = one.got.get();
    CHECK(got.failed && got.failure.kind == Kind::kNoResource && got.failure.what == told);
  }
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  for (const int one : fill) close(one);
  for (int i = 0; i < 3; ++i) {
    for (const Got& got : exchange("y")) CHECK(!got.failed);
  }
#ifndef KVTABLE_TEST_FEW_ROUNDS  // a sanitizer has more memory than may be
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  constexpr size_t kMuch = size_t{256} << 20;
  const auto much = all[0]->Take(kMuch);
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit now{static_cast<rlim_t>(pages) * 4096 + kMuch / 2, before.rlim_max};
  CHECK(setrlimit(RLIMIT_AS, &now) == 0);
  std::promise<std::string> of_memory;
  sent = {"y", "bytes", {0, 4, 0}, much->data(), much, much, ""};
  all[0]->Start(std::move(sent), [&](const auto&, const ExchangeFailure* failure) {
    of_memory.set_value(failure == nullptr ? "" : failure->what);
  });
  others.clear();
  for (const size_t r : {1, 2}) others.push_back(Start(all[r].get(), "y", {"", "", ""}));
  const std::string of = of_memory.get_future().get();
  CHECK(of.find("exchange 'y': rank 1 cannot map what rank 0 sends: 268435456 bytes are more than it may map "
                "(Cannot allocate memory; see ulimit -v)") == 0);
  for (Running& one : others) CHECK(one.got.get().failure.what == of);
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  for (const Got& got : exchange("y")) CHECK(!got.failed);
#endif
}

// Memory that is shared goes back to the system though nobody calls.
void IdleBuffersGoByThemselves() {
  SharedExchange::Options options;
  options.idle_after = std::chrono::milliseconds(500);
  const auto all = Ranks(2, options);
  const auto shared = [] {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:kvtools") != std::string::npos) return true;
    }
    return false;
  };
  auto held = all[0]->Take(1);  // that much stays for as long as it is held
  {
    Running one = Start(all[0].get(), "x", {"", PartOf(0, 1, 0, 1 << 20)});
    Running other = Start(all[1].get(), "x", {PartOf(1, 0, 0, 1 << 20), ""});
    CHECK(!one.got.get().failed && !other.got.get().failed);
  }
  CHECK(shared());
  held.reset();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (shared() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  CHECK(!shared());
}

void AProblemOfARankIsToldToAll() {
  const auto all = Ranks(3);
  std::vector<Running> running;
  for (const int r : {0, 1})
    running.push_back(Start(all[static_cast<size_t>(r)].get(), "x", {"a", "b", "c"}));
  SharedExchange::Sent sent{"x", "bytes", {1, 1, 1}, nullptr, nullptr, nullptr, "no memory"};
  std::promise<ExchangeFailure> promise;
  all[2]->Start(sent, [&](const auto&, const ExchangeFailure* failure) { promise.set_value(*failure); });
  CHECK(promise.get_future().get().what == "exchange 'x': rank 2: no memory");
  for (Running& one : running) {
    const Got got = one.got.get();
    CHECK(got.failed && got.failure.kind == Kind::kNoResource);
    CHECK(got.failure.what == "exchange 'x': rank 2: no memory");
  }
  running.clear();
  for (const auto& one : all) running.push_back(Start(one.get(), "x", {"a", "b", "c"}));
  for (Running& one : running) CHECK(!one.got.get().failed);
}

void OtherKindsAndNamesUnderWayFail() {
  const auto all = Ranks(2);
  Running one = Start(all[0].get(), "x", {"a", "b"}, "float32");
  Running other = Start(all[1].get(), "x", {"c", "d"}, "int64");
  const Got got = one.got.get();
  CHECK(got.failed && got.failure.kind == Kind::kOtherKind);
  CHECK(got.failure.what.find("rank 1 sends int64, and rank 0 float32") != std::string::npos);
  CHECK(other.got.get().failed);
  one = Start(all[0].get(), "x", {"a", "b"});
  CHECK(
      Throws(ErrorCode::kInvalidArgument, "'x' is under way", [&] { Start(all[0].get(), "x", {"a", "b"}); }));
  const std::string long_name(100000, 'x');
  CHECK(Throws(ErrorCode::kInvalidArgument, "shorter", [&] { Start(all[0].get(), long_name, {"a", "b"}); }));
  other = Start(all[1].get(), "x", {"c", "d"});
  CHECK(one.got.get().parts == (std::vector<std::string>{"a", "c"}));
  CHECK(other.got.get().parts == (std::vector<std::string>{"b", "d"}));
}

void ACancelledOneIsNotTakenForTheNext() {
  const auto all = Ranks(2);
  Running cancelled = Start(all[0].get(), "x", {"a", "b"});
  all[0]->Cancel(cancelled.number);
  const Got got = cancelled.got.get();
  CHECK(got.failed && got.failure.kind == Kind::kCancelled);
  CHECK(!all[0]->is_idle());
  Running next = Start(all[0].get(), "x", {"e", "f"});
  CHECK(Start(all[1].get(), "x", {"c", "d"}).got.get().parts == (std::vector<std::string>{"b", "d"}));
  CHECK(Start(all[1].get(), "x", {"g", "h"}).got.get().parts == (std::vector<std::string>{"f", "h"}));
  CHECK(next.got.get().parts == (std::vector<std::string>{"e", "g"}));
  all[0]->Cancel(next.number);  // it has ended
  CHECK(all[0]->is_idle());
}

// A rank cancels one and is in the next, which all confirm, when a part of the first is still on its way to it: what
// the others can read of the next is not taken for that.
void WhatIsConfirmedIsNotTakenForACancelledOne() {
  auto sockets = SocketsOf(3);
  int relay[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, relay) == 0);
  std::swap(sockets[0][2], relay[0]);  // what rank 2 sends to rank 0 is held up
  std::promise<void> go_on;
  const auto pass = [](int from, int to) {
    std::vector<char> bytes(1 << 16);
    for (ssize_t size; (size = recv(from, bytes.data(), bytes.size(), 0)) > 0;) {
      CHECK(send(to, bytes.data(), static_cast<size_t>(size), MSG_NOSIGNAL) == size || errno == EPIPE);
    }
    shutdown(to, SHUT_RDWR);
  };
  std::thread there(pass, relay[1], relay[0]);
  std::thread back([&] {
    go_on.get_future().wait();
    pass(relay[0], relay[1]);
  });
  {
    std::vector<std::unique_ptr<SharedExchange>> all;
    for (int r = 0; r < 3; ++r) {
      all.push_back(
          std::make_unique<SharedExchange>(r, sockets[static_cast<size_t>(r)], SharedExchange::Options{}));
    }
    const auto start = [&](size_t r, const std::string& part) {
      return Start(all[r].get(), "x", {"", part, ""});
    };
    Running cancelled = start(0, "");
    all[0]->Cancel(cancelled.number);
    std::vector<Running> running;
    running.push_back(start(0, "new memory"));
    Running first = start(1, "");
    CHECK(!start(2, "").got.get().failed && !first.got.get().failed);
    for (const size_t r : {1, 2}) running.push_back(start(r, ""));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // what rank 1 says comes first
    go_on.set_value();
    for (Running& one : running) {
      CHECK(one.got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
      CHECK(!one.got.get().failed);
    }
  }
  there.join();
  back.join();
  for (const int one : relay) close(one);
}

void ARankThatEndsIsTold() {
  auto all = Ranks(3);
  Running last = Start(all[1].get(), "last", {"a", "b", "c"});
  Running waits = Start(all[0].get(), "x", {"a", "b", "c"});
  Running of_two = Start(all[2].get(), "x", {"a", "b", "c"});
  all[1].reset();
  for (Running* one : {&waits, &of_two}) {
    const Got got = one->got.get();
    CHECK(got.failed && got.failure.kind == Kind::kRankLost);
    CHECK(got.failure.what.find("rank 1 has ended") != std::string::npos);
  }
  CHECK(last.got.get().failed);
  // What it sent before is there, and more is not.
  Running of_zero = Start(all[0].get(), "last", {"d", "e", "f"});
  CHECK(Start(all[2].get(), "last", {"g", "h", "i"}).got.get().parts ==
        (std::vector<std::string>{"f", "c", "i"}));
  CHECK(of_zero.got.get().parts == (std::vector<std::string>{"d", "a", "g"}));
  CHECK(Start(all[0].get(), "last", {"d", "e", "f"}).got.get().failed);
  CHECK(!all[0]->is_idle());
}

// A rank ends when not all have its part: whether those can read it, who lack it, is not waited for.
void ARankThatEndsHoldsNobodyUp() {
  const auto sockets = SocketsOf(3);
  CHECK(shutdown(sockets[2][1], SHUT_RDWR) == 0);
  std::vector<std::unique_ptr<SharedExchange>> all;
  for (int r = 0; r < 3; ++r) {
    all.push_back(
        std::make_unique<SharedExchange>(r, sockets[static_cast<size_t>(r)], SharedExchange::Options{}));
  }
  std::vector<Running> running;
  for (const auto& one : all) running.push_back(Start(one.get(), "x", {"a", "b", "c"}));
  for (const size_t r : {1, 2}) CHECK(running[r].got.get().failure.kind == Kind::kRankLost);
  all[1].reset();
  CHECK(running[0].got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
  CHECK(running[0].got.get().parts == (std::vector<std::string>{"a", "a", "a"}));
}

// A process that is killed, and has a child which lives on with all it had open.
void AKilledProcessIsTold() {
  const auto sockets = SocketsOf(2);
  const pid_t process = fork();
  CHECK(process >= 0);
  if (process == 0) {
    close(sockets[0][1]);
    SharedExchange mine(1, sockets[1], {});
    if (fork() == 0) {
      sleep(20);
      _exit(0);
    }
    Start(&mine, "x", {PartOf(1, 0, 0, 100000), ""}).got.wait();
    Start(&mine, "x", {PartOf(1, 0, 1, 200000), ""});  // not waited for
    kill(getpid(), SIGKILL);
  }
  close(sockets[1][0]);
  SharedExchange mine(0, sockets[0], {});
  CHECK(Start(&mine, "x", {"", ""}).got.get().parts[1] == PartOf(1, 0, 0, 100000));
  int status;
  CHECK(waitpid(process, &status, 0) == process && WIFSIGNALED(status));
  CHECK(Start(&mine, "x", {"", ""}).got.get().parts[1] == PartOf(1, 0, 1, 200000));
  const auto before = std::chrono::steady_clock::now();
  CHECK(Start(&mine, "x", {"", ""}).got.get().failure.kind == Kind::kRankLost);
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(10));
}

void LongWaitsAreToldAndEnd() {
  SharedExchange::Options options;
  options.warn_after = std::chrono::milliseconds(1000);
  options.fail_after = std::chrono::milliseconds(2500);
  std::mutex mutex;
  std::vector<std::string> warned;
  options.warn = [&](const std::string& text) {
    const std::lock_guard<std::mutex> hold(mutex);
    warned.push_back(text);
  };
  const auto all = Ranks(2, options);
  Running one = Start(all[0].get(), "x", {"a", "b"});
  Running other = Start(all[1].get(), "y", {"a", "b"});
  const Got got = one.got.get();
  CHECK(got.failed && got.failure.kind == Kind::kStalled);
  CHECK(got.failure.what.find("in exchange 'x' for rank 1, which is in 'y'") != std::string::npos);
  CHECK(got.failure.what.find("graphs that differ") == std::string::npos);
  CHECK(other.got.get().failed);
  Running called = Start(all[0].get(), "x of Call/op", {"a", "b"});
  Running called_later = Start(all[1].get(), "x of Call_1/op", {"a", "b"});
  CHECK(called.got.get().failure.what.find("graphs that differ") != std::string::npos);
  CHECK(called_later.got.get().failed);
  const std::lock_guard<std::mutex> hold(mutex);
  CHECK(warned.size() >= 2);
}

// Many wait for one rank, which is late: one warning after each time names them.
void WhatWaitsIsToldOfTogether() {
  SharedExchange::Options options;
  options.warn_after = std::chrono::milliseconds(1500);
  std::mutex mutex;
  std::vector<std::string> warned;
  options.warn = [&](const std::string& text) {
    const std::lock_guard<std::mutex> hold(mutex);
    warned.push_back(text);
  };
  const auto begin = std::chrono::steady_clock::now();
  {
    auto all = Ranks(2);
    const auto sockets = SocketsOf(2);
    all[0] = std::make_unique<SharedExchange>(0, sockets[0], options);
    all[1] = std::make_unique<SharedExchange>(1, sockets[1], SharedExchange::Options{});
    std::vector<Running> running;
    for (int i = 0; i < 12; ++i) running.push_back(Start(all[0].get(), "x" + std::to_string(i), {"", ""}));
    const auto is_told = [&] {
      const std::lock_guard<std::mutex> hold(mutex);
      return !warned.empty();
    };
    for (int i = 0; i < 2000 && !is_told(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    for (int i = 0; i < 12; ++i) running.push_back(Start(all[1].get(), "x" + std::to_string(i), {"", ""}));
    for (Running& one : running) CHECK(!one.got.get().failed);
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  const std::lock_guard<std::mutex> hold(mutex);
  CHECK(!warned.empty() && warned.size() <= static_cast<size_t>(took / options.warn_after));
  CHECK(warned[0].find(" s in exchange 'x0' for rank 1; ") != std::string::npos);
  CHECK(warned[0].find("and in 2 more: every rank makes the same calls") != std::string::npos);
}

// More messages than the sockets have room for, to a rank that is held up.
void MessagesWaitForRoom() {
  const auto all = Ranks(2);
  constexpr int kMany = 1000;
  std::promise<void> begun, go_on;
  SharedExchange::Sent sent{"holds up", "", {0, 0}, nullptr, nullptr, nullptr, ""};
  all[1]->Start(sent, [&](const auto&, const ExchangeFailure*) {
    begun.set_value();
    go_on.get_future().wait();
  });
  Running first = Start(all[0].get(), "holds up", {"", ""}, "");
  begun.get_future().wait();
  std::vector<Running> running;
  for (int i = 0; i < kMany; ++i) running.push_back(Start(all[0].get(), std::to_string(i), {"", ""}));
  go_on.set_value();
  for (int i = 0; i < kMany; ++i) CHECK(!Start(all[1].get(), std::to_string(i), {"", ""}).got.get().failed);
  for (Running& one : running) CHECK(!one.got.get().failed);
}

// A socket's buffer may be as small as the system allows.
void MessagesMayBeLargerThanABuffer() {
  const auto sockets = SocketsOf(2);
  const int least = 1;
  for (size_t r = 0; r < 2; ++r) {
    CHECK(setsockopt(sockets[r][1 - r], SOL_SOCKET, SO_SNDBUF, &least, sizeof least) == 0);
  }
  SharedExchange one(0, sockets[0], {}), other(1, sockets[1], {});
  const std::string name(60000, 'x'), part = PartOf(0, 1, 0, 100);
  std::vector<Running> running;
  for (const std::string& of : {name, std::string("short")}) {
    running.push_back(Start(&one, of, {"", part}));
    running.push_back(Start(&other, of, {"", ""}));
  }
  for (size_t i = 0; i < 4; ++i) {
    CHECK(running[i].got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
    const Got got = running[i].got.get();
    CHECK(!got.failed && (i % 2 == 0 || got.parts[0] == part));
  }
}

// The last messages of a rank are delivered before it goes, and then the others know, whatever it still holds.
void WhatIsUnsentIsSentAtTheEnd() {
  SharedExchange::Options options;
  options.last_words_for = std::chrono::milliseconds(60000);
  auto all = Ranks(2, options);
  std::promise<void> begun, go_on;
  SharedExchange::Sent sent{"holds up", "", {0, 0}, nullptr, nullptr, nullptr, ""};
  all[1]->Start(sent, [&](const auto&, const ExchangeFailure*) {
    begun.set_value();
    go_on.get_future().wait();
  });
  std::promise<std::shared_ptr<const SharedExchange::Arrival>> kept;
  all[0]->Start(sent, [&](std::shared_ptr<const SharedExchange::Arrival> arrival, const ExchangeFailure*) {
    kept.set_value(std::move(arrival));
  });
  const auto held = kept.get_future().get();
  begun.get_future().wait();
  constexpr int kMany = 1000;
  std::vector<Running> running;
  for (int i = 0; i < kMany; ++i) running.push_back(Start(all[0].get(), std::to_string(i), {"", ""}));
  std::future<void> ends = std::async(std::launch::async, [&] {
    all[0]->AwaitSent();
    all[0].reset();
  });
  CHECK(ends.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
  go_on.set_value();
  ends.get();
  for (int i = 0; i < kMany; ++i) CHECK(!Start(all[1].get(), std::to_string(i), {"", ""}).got.get().failed);
  Running last = Start(all[1].get(), "no more", {"", ""});
  CHECK(last.got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
  CHECK(last.got.get().failure.kind == Kind::kRankLost);
}

// The end does not wait for a rank that takes nothing.
void TheEndIsNotHeldUp() {
  const auto ends = SocketsOf(2);
  SharedExchange::Options options;
  options.last_words_for = std::chrono::milliseconds(100);
  auto mine = std::make_unique<SharedExchange>(0, ends[0], options);
  std::vector<Running> running;
  for (int i = 0; i < 1000; ++i) running.push_back(Start(mine.get(), std::to_string(i), {"", ""}));
  const auto before = std::chrono::steady_clock::now();
  mine.reset();
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(10));
  for (Running& one : running) CHECK(one.got.get().failed);
  close(ends[1][0]);
}

double CpuSeconds() {
  rusage used;
  CHECK(getrusage(RUSAGE_SELF, &used) == 0);
  const auto seconds = [](const timeval& time) { return double(time.tv_sec) + double(time.tv_usec) * 1e-6; };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// The system has too many files of this user on their way: that is waited for, though not without an end.
void FilesThatMayNotBeSentAreAnError() {
  const pid_t process = fork();
  CHECK(process >= 0);
  if (process == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(0);  // root may send any number
    const rlimit few{64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    SharedExchange::Options options;
    options.held_up_for = std::chrono::milliseconds(1500);
    const auto all = Ranks(2, options);
    int pair[2];
    // As many as may be, on their way to nobody; returns whether there is such a bound.
    const auto fill = [&] {
      CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
      char byte = 0;
      iovec part{&byte, 1};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
      msghdr head{};
      head.msg_iov = &part;
      head.msg_iovlen = 1;
      head.msg_control = control;
      head.msg_controllen = sizeof control;
      cmsghdr* const file = CMSG_FIRSTHDR(&head);
      file->cmsg_level = SOL_SOCKET;
      file->cmsg_type = SCM_RIGHTS;
      file->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(file), &pair[0], sizeof(int));
      for (int i = 0; i < 1000; ++i) {
        if (sendmsg(pair[0], &head, MSG_DONTWAIT) != 1) return errno == ETOOMANYREFS;
      }
      return false;
    };
    const auto drain = [&] {
      close(pair[0]);
      close(pair[1]);
    };
    if (!fill()) _exit(0);
    const auto exchange = [&](size_t bytes) {
      Running one = Start(all[0].get(), "x", {"", PartOf(0, 1, 0, bytes)});
      Running other = Start(all[1].get(), "x", {"", ""});
      for (Running* const running : {&one, &other}) {
        CHECK(running->got.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
      }
      const std::vector<Got> both{one.got.get(), other.got.get()};
      CHECK(both[0].failed == both[1].failed && both[0].failure.what == both[1].failure.what);
      CHECK(both[1].failed || both[1].parts[0] == PartOf(0, 1, 0, bytes));
      return both[1];
    };
    std::future<void> later = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      drain();
    });
    CHECK(!exchange(100).failed);
    later.get();
    CHECK(fill());
    const double cpu = CpuSeconds();
    const auto begin = std::chrono::steady_clock::now();
    // After the first time nobody waits anew.
    for (int i = 0; i < 4; ++i) {
      const Got got = exchange(1 << 20);
      CHECK(got.failed && got.failure.kind == Kind::kNoResource);
      CHECK(
          got.failure.what.find("exchange 'x': rank 1 cannot map what rank 0 sends: that rank's user has too "
                                "many files on their way") == 0);
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    CHECK(took >= options.held_up_for && took < 3 * options.held_up_for);
    CHECK(CpuSeconds() - cpu < 0.5);
    drain();
    CHECK(!exchange(1 << 20).failed);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(process, &status, 0) == process && status == 0);
}

void AForkHasNoExchange() {
  auto all = Ranks(2);
  Running one = Start(all[0].get(), "x", {"a", "b"});
  Running other = Start(all[1].get(), "x", {"c", "d"});
  CHECK(!one.got.get().failed && !other.got.get().failed);
  const pid_t fork_of_one = fork();
  CHECK(fork_of_one >= 0);
  if (fork_of_one == 0) {
    alarm(20);
    const char* const told = "this process was forked from rank 0 and has no exchange with the other ranks";
    CHECK(Throws(ErrorCode::kFailedPrecondition, told, [&] { all[0]->Take(100); }));
    CHECK(Throws(ErrorCode::kFailedPrecondition, told,
                 [&] { all[0]->Start({"x", "bytes", {0, 0}, nullptr, nullptr, nullptr, ""}, {}); }));
    all[0]->Cancel(1);
    all.clear();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(fork_of_one, &status, 0) == fork_of_one && status == 0);
  one = Start(all[0].get(), "x", {"a", "b"});
  other = Start(all[1].get(), "x", {"c", "d"});
  CHECK(!one.got.get().failed && !other.got.get().failed);
}

// Memory that is asked for lies behind a buffer, which its last owner lets go of at that moment.
void BuffersGoWhileOthersAreLookedFor() {
  SharedExchange exchange(0, {-1}, {});
  const char* const end = exchange.Take(1)->data() + exchange.Take(1)->bytes();
  std::atomic<bool> over{false};
  std::future<void> done = std::async(std::launch::async, [&] {
    for (int i = 0; i < kRounds * 5000; ++i) exchange.Take(1);
    over = true;
  });
  std::future<void> looked = std::async(std::launch::async, [&] {
    while (!over) CHECK(exchange.Holding(end, 1) == nullptr);
  });
  for (std::future<void>* one : {&done, &looked}) {
    CHECK(one->wait_for(std::chrono::seconds(120)) == std::future_status::ready);
  }
}

struct Log : RankSockets::Receiver {
  void Received(int rank, const char* bytes, size_t size, int) override {
    what.push_back(std::to_string(rank) + " " + std::string(bytes, size));
  }
  void Gone(int rank) override { what.push_back(std::to_string(rank) + " has gone"); }
  std::vector<std::string> what;
};

// A system says first that a message of this rank was left unread.
void WhatARankSentBeforeItEndedComes() {
  const auto ends = SocketsOf(2);
  Log log;
  RankSockets sockets(0, ends[0], std::chrono::seconds(1));
  sockets.Send(1, "not read");
  const std::string pieces[] = {{0, 'o', 'n', 'e'}, {1, 't', 'w'}, {0, 'o'}};
  for (const std::string& piece : pieces) {
    CHECK(send(ends[1][0], piece.data(), piece.size(), 0) == static_cast<ssize_t>(piece.size()));
  }
  close(ends[1][0]);
  sockets.Receive(&log);
  CHECK((log.what == std::vector<std::string>{"1 one", "1 two", "1 has gone"}));
}

// A message that the system refuses: those after it must not be taken for it, and both ranks know.
void WhatCannotBeSentEndsTheConnection() {
  const auto ends = SocketsOf(2);
  RankSockets sockets(0, ends[0], std::chrono::seconds(1));
  const int closed = dup(ends[1][0]);
  close(closed);
  sockets.Send(1, "what", closed);
  sockets.Send(1, "next");
  CHECK(sockets.why_gone(1) == "a message of 4 bytes cannot be sent to it (Bad file descriptor)");
  Log log;
  sockets.Receive(&log);
  CHECK((log.what == std::vector<std::string>{"1 has gone"}));
  char byte;
  CHECK(recv(ends[1][0], &byte, 1, 0) == 0);
  close(ends[1][0]);
}

// The numbers of sockets that a child has closed are free for its files, which its own children keep.
void ChildrenOfChildrenKeepTheirFiles() {
  const auto ends = SocketsOf(2);
  const RankSockets sockets(0, ends[0], std::chrono::seconds(1));
  const pid_t child = fork();
  if (child == 0) {
    CHECK(fcntl(ends[0][1], F_GETFD) < 0);
    CHECK(dup2(ends[1][0], ends[0][1]) == ends[0][1]);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(fcntl(ends[0][1], F_GETFD) < 0 ? 1 : 0);
    int status = 0;
    CHECK(waitpid(grandchild, &status, 0) == grandchild);
    _exit(status == 0 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  close(ends[1][0]);
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::AKilledProcessIsTold();  // forks: before there are threads
  kvtable::ChildrenOfChildrenKeepTheirFiles();
  kvtable::FilesThatMayNotBeSentAreAnError();
  kvtable::EachRankGetsWhatTheOthersSend();
  kvtable::WhatIsSentStaysUntilAllHaveReadIt();
  kvtable::BuffersAreUsedAgainAndGoWhenIdle();
  kvtable::AFileThatIsLostIsSentAgain();
  kvtable::WhatOneRankCannotMapFailsOnAll();
  kvtable::IdleBuffersGoByThemselves();
  kvtable::AProblemOfARankIsToldToAll();
  kvtable::BuffersNeedNoOpenFiles();
  kvtable::OtherKindsAndNamesUnderWayFail();
  kvtable::ACancelledOneIsNotTakenForTheNext();
  kvtable::WhatIsConfirmedIsNotTakenForACancelledOne();
  kvtable::ARankThatEndsIsTold();
  kvtable::ARankThatEndsHoldsNobodyUp();
  kvtable::LongWaitsAreToldAndEnd();
  kvtable::WhatWaitsIsToldOfTogether();
  kvtable::MessagesWaitForRoom();
  kvtable::MessagesMayBeLargerThanABuffer();
  kvtable::WhatIsUnsentIsSentAtTheEnd();
  kvtable::TheEndIsNotHeldUp();
  kvtable::AForkHasNoExchange();
  kvtable::WhatARankSentBeforeItEndedComes();
  kvtable::WhatCannotBeSentEndsTheConnection();
  kvtable::BuffersGoWhileOthersAreLookedFor();
  return 0;
}
