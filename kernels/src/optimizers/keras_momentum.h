// Momentum as Keras does it, the learning rate inside of the slot:
//   m = momentum * m - lr * g;  w += m;  Nesterov: w += momentum * m - lr * g
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct KerasMomentum {
  static constexpr const char* kName = "keras_momentum";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"momentum", 0.9, Range::kUnit},
      {"nesterov", 0.0, Range::kFlag},
  }};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"momentum", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          momentum(static_cast<C>(h[0])),
          from_slot(static_cast<C>(h[1] != 0 ? h[0] : 1)),
          from_gradient(static_cast<C>(h[1] != 0 ? lr : 0)) {}
    C lr, momentum, from_slot, from_gradient;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      m[j] = k.momentum * m[j] - k.lr * g[j];
      w[j] += k.from_slot * m[j] - k.from_gradient * g[j];
    }
    return false;
  }
};

}  // namespace kvtable
