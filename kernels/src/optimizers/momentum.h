// Momentum as TensorFlow's training ops do it, the learning rate outside of the accumulator:
//   a = momentum * a + g;  w -= lr * a;  Nesterov: w -= lr * (g + momentum * a)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Momentum {
  static constexpr const char* kName = "momentum";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"momentum", 0.9, Range::kUnit},
      {"nesterov", 0.0, Range::kFlag},
  }};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"accumulator", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          momentum(static_cast<C>(h[0])),
          from_gradient(static_cast<C>(h[1] != 0 ? lr : 0)),
          from_accumulator(static_cast<C>(h[1] != 0 ? lr * h[0] : lr)) {}
    C lr, momentum, from_gradient, from_accumulator;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      a[j] = k.momentum * a[j] + g[j];
      w[j] -= k.from_gradient * g[j] + k.from_accumulator * a[j];
    }
    return false;
  }
};

}  // namespace kvtable
