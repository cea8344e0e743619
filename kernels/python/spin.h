// An event loop that looks for the next request for a while before it sleeps.
#pragma once

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace kvtable {

// As long as something was answered less than `seconds` ago, a callback of the loop stands ready, and a loop with one
// does not sleep. Used with the GIL held, on the loop's thread; the loop lets go of the GIL in each of its turns.
//
// Bounded, it does so only where that costs nobody anything: looking in vain may take a share of the time, kShare, so requests
// that do not come within `seconds` of each other are soon slept for; and where others wait for the processor, it rests.
class Spin {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // `call_soon(callback)` has the loop call something in its next turn.
  Spin(double seconds, nanobind::object call_soon, bool bounded)
      : time_(seconds), bounded_(bounded), call_soon_(std::move(call_soon)) {}
  ~Spin() {
    if (waits_ >= 0) ::close(waits_);
  }
  Spin(const Spin&) = delete;
  void operator=(const Spin&) = delete;

  // Something came.
  void Arrive(Clock::time_point now) {
    if (!running_) return;
    found_ += now - from_;
    from_ = now;
  }

  // Something was answered.
  void Touch(Clock::time_point now) {
    if (bounded_) left_ = std::min(kMostLeft, left_ + kShare * Seconds(now - last_).count());
    last_ = from_ = now;
    running_ = !bounded_ || (left_ >= time_.count() && now >= rests_until_);
    if (running_ && !queued_) Again();
  }

  // What the loop calls.
  void Turn(Clock::time_point now) {
    queued_ = false;
    if (!running_) return;
    if (Seconds(now - last_) >= time_) {
      running_ = false;
      vain_ += now - from_;
      left_ -= Seconds(now - from_).count();
    } else if (bounded_ && now >= look_at_ && OthersWait(now)) {
      running_ = false;
      rests_until_ = now + kRest;
    } else {
      Again();
    }
  }

  // How long it has looked for requests that came, and for some that did not.
  double found() const { return found_.count(); }
  double vain() const { return vain_.count(); }

 private:
  static constexpr double kShare = 0.05;
  static constexpr double kMostLeft = 0.01;  // seconds
  // Of a tenth of a second others may have a quarter now and then: a slice is 3 ms. Who computes beside has a half.
  static constexpr std::chrono::milliseconds kLookEvery{100};
  static constexpr std::chrono::seconds kRest{1};
  static constexpr double kMostWaiting = 0.25;

  void Again() {
    queued_ = true;
    call_soon_(nanobind::find(this).attr("turn"));
  }

  // Whether this thread has waited for its processor since the last look, other threads or a limit of the container in
  // its way. Where the system does not tell, they are not seen.
  bool OthersWait(Clock::time_point now) {
    if (waits_ == kNotOpened) waits_ = ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    char text[96];
    const ssize_t size = waits_ < 0 ? 0 : ::pread(waits_, text, sizeof(text) - 1, 0);
    if (size <= 0) {
      look_at_ = Clock::time_point::max();
      return false;
    }
    text[size] = 0;
    char* rest = text;
    std::strtoull(rest, &rest, 10);  // nanoseconds on a processor
    const uint64_t waited = std::strtoull(rest, &rest, 10);
    const double since = Seconds(now - looked_).count();
    const double waiting = 1e-9 * static_cast<double>(waited - std::exchange(waited_, waited));
    looked_ = now;
    look_at_ = now + kLookEvery;
    // After a pause it begins anew: what was waited then was not for this.
    return since < 10 * Seconds(kLookEvery).count() && waiting > kMostWaiting * since;
  }

  static constexpr int kNotOpened = -2;

  Seconds time_;
  const bool bounded_;
  nanobind::object call_soon_;
  Clock::time_point last_;  // when something was answered
  Clock::time_point from_;  // since when it looks
  bool running_ = false;    // it looks
  bool queued_ = false;     // the loop is going to call it
  double left_ = 0;         // seconds that may go in vain
  Seconds found_{0}, vain_{0};
  int waits_ = kNotOpened;
  uint64_t waited_ = 0;
  Clock::time_point look_at_, looked_, rests_until_;
};

}  // namespace kvtable
