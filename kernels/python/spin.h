// An event loop that looks for the next request for a while before it sleeps.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <utility>

namespace kvtable {

// As long as something was answered less than `seconds` ago, a callback of the loop stands ready, and a loop with one
// does not sleep. Used with the GIL held; the loop lets go of it in each of its turns.
class Spin {
 public:
  using Clock = std::chrono::steady_clock;

  // `call_soon(callback)` has the loop call something in its next turn.
  Spin(double seconds, nanobind::object call_soon)
      : time_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))),
        call_soon_(std::move(call_soon)) {}

  // Something was answered.
  void Touch(Clock::time_point now) {
    last_ = now;
    if (running_) return;
    running_ = true;
    Again();
  }

  // What the loop calls.
  void Turn() {
    running_ = running_ && Clock::now() - last_ < time_;
    if (running_) Again();
  }

 private:
  void Again() { call_soon_(nanobind::find(this).attr("turn")); }

  Clock::duration time_;
  nanobind::object call_soon_;
  Clock::time_point last_;
  bool running_ = false;
};

}  // namespace kvtable
