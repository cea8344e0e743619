// What training steps measure of their gradients, where somebody asked for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <mutex>

#include "tensorflow/core/framework/tensor.h"

namespace kvtools {

class GradientWatch {
 public:
  struct Norms {
    int64_t steps = 0;
    double sum = 0.0;       // of the steps' norms
    double greatest = 0.0;  // of them
    double greatest_row = 0.0;
    int64_t nonfinite_rows = 0;
  };

  void set_on(bool on) { on_.store(on, std::memory_order_relaxed); }
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Gradients of a step in host memory, [n, dim], or, unless `places` is null, these n rows of them. Rows that are not
  // finite count, and are in no norm.
  template <class T>
  void Measure(const T* gradients, const uint32_t* places, int64_t n, int64_t dim) {
    double squares = 0.0;
    double greatest = 0.0;
    int64_t nonfinite = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t first = (places == nullptr ? i : int64_t{places[i]}) * dim;
      double row = 0.0;
      for (int64_t d = 0; d < dim; ++d) {
        const double g = static_cast<double>(gradients[first + d]);
        row += g * g;
      }
      if (!std::isfinite(row)) {
        ++nonfinite;
        continue;
      }
      squares += row;
      greatest = std::max(greatest, row);
    }
    const double norm = std::sqrt(squares);
    std::lock_guard<std::mutex> lock(mu_);
    ++norms_.steps;
    norms_.sum += norm;
    norms_.greatest = std::max(norms_.greatest, norm);
    norms_.greatest_row = std::max(norms_.greatest_row, std::sqrt(greatest));
    norms_.nonfinite_rows += nonfinite;
  }

  // What was measured since the last call.
  Norms Take() {
    std::lock_guard<std::mutex> lock(mu_);
    const Norms taken = norms_;
    norms_ = Norms();
    return taken;
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mu_;
  Norms norms_;
};

}  // namespace kvtools
