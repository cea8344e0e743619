// The time in which what is served, and to whom, stays as it is.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

namespace kvtable {

// What is prepared from the state of a server is of one epoch, and of no use after it. It does not keep tables alive:
// the epoch does, which lets go of them when it ends, so that the files of a version that is served no more are unmapped
// even where a connection has something prepared from it. Used with the GIL held.
class Epoch {
 public:
  bool valid() const { return valid_; }

  // Keeps `object` until the end; does nothing after it.
  void Hold(nanobind::object object) {
    if (valid_) held_.push_back(std::move(object));
  }

  void End() {
    valid_ = false;
    // What goes may call Python, which may call this again.
    std::vector<nanobind::object> held = std::exchange(held_, {});
    held.clear();
  }

 private:
  bool valid_ = true;
  std::vector<nanobind::object> held_;
};

}  // namespace kvtable
